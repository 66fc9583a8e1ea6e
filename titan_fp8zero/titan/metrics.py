"""Metrics for people and programs: `metrics.jsonl` and `loss.png` in the dump folder, beside what
TorchTitan logs itself."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModelArgs

from titan_fp8zero.metrics_file import METRICS_FILE, MetricsWriter, plot_losses, read_metrics
from titan_fp8zero.titan.container import MainParameterOptimizers

LOSS_PLOT = "loss.png"


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: BaseModelArgs | None = None,
    tag: str | None = None,
) -> MetricsProcessor:
    """Builds the metrics processor; only the rank that knows the loss writes files."""
    if dist.get_rank() != _get_metrics_rank(parallel_dims, job_config):
        return MetricsProcessor(job_config, parallel_dims, tag)
    return FileMetricsProcessor(job_config, parallel_dims, tag)


class FileMetricsProcessor(MetricsProcessor):
    """TorchTitan's metrics processor, which also writes `metrics.jsonl` and `loss.png`."""

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self._folder = Path(job_config.job.dump_folder)
        self._writer: MetricsWriter | None = None

    def should_log(self, step: int) -> bool:
        # The trainer asks at every step; the first it asks about is the first of this run.
        if self._writer is None:
            self._writer = MetricsWriter(self._folder / METRICS_FILE, first_step=step)
        return super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        extra_metrics = dict(extra_metrics or {})
        if isinstance(self.optimizers, MainParameterOptimizers):
            extra_metrics["skipped_steps"] = self.optimizers.skipped_steps
        self._write(
            step=step,
            loss=global_avg_loss,
            grad_norm=grad_norm,
            tokens_per_s=self._tokens_per_second(),
            memory=self.device_memory_monitor.get_peak_stats().max_reserved_gib,
            **{k: v for k, v in extra_metrics.items() if isinstance(v, int | float)},
        )
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        self._write(step=step, validation_loss=loss)
        super().log_validation(loss, step, extra_metrics)

    def close(self) -> None:
        super().close()
        if self._writer is not None:
            self._writer.close()
            self._plot()

    def _write(self, **metrics: float) -> None:
        assert self._writer is not None, "the trainer asks should_log first"
        self._writer.write(metrics)

    def _tokens_per_second(self) -> float:
        """Of all ranks together; only data-parallel ranks read data of their own."""
        dims = self.parallel_dims
        tokens = self.ntokens_since_last_log * dims.dp_replicate * dims.dp_shard
        return tokens / (time.perf_counter() - self.time_last_log)

    def _plot(self) -> None:
        metrics = read_metrics(self._folder / METRICS_FILE)
        curves = {
            name: [(line["step"], line[key]) for line in metrics if key in line]
            for name, key in (("training", "loss"), ("validation", "validation_loss"))
        }
        plot_losses(
            {name: curve for name, curve in curves.items() if curve}, self._folder / LOSS_PLOT
        )
