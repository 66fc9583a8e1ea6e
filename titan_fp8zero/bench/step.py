"""The ZeRO-1 step of a model, phase by phase, with blockwise FP8 and without. Run by every rank.

    torchrun --nproc_per_node 2 -m titan_fp8zero.bench.step \\
        --job.config_file train_configs/llama3_8b.toml

Arguments are TorchTitan's. Gradients are random and the data is never read, so that the config
needs neither text nor tokenizer. Writes `step.json` and `step.png` into `[job] dump_folder`.
"""

import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

import torchtitan_patches
from titan_fp8zero.bench.measure import (
    ADAMW_BYTES,
    fused_adamw_ms,
    measure_machine,
    this_device,
)
from titan_fp8zero.bench.report import Report, Row
from titan_fp8zero.main_parameter import local_tensor
from titan_fp8zero.zero1 import Zero1

WARM_UP, REPEATS = 2, 7
WITHOUT_ASSETS = [
    *("--training.dataset", "python_docs", "--model.hf_assets_path"),
    "./outputs/python_docs_tokenizer",
    *("--validation.no-enable", "--checkpoint.no-enable", "--metrics.no-enable-tensorboard"),
]
VARIANTS = {"FP8": [], "high-precision": ["--blockwise_fp8.fqns", ""]}
FIRST = next(iter(VARIANTS))


@record
def main() -> None:
    """Measures both variants; rank 0 prints and writes."""
    if not torch.cuda.is_available():
        torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)
    from torchtitan.tools.logging import init_logger
    from torchtitan.tools.logging import logger as titan_logger

    init_logger()
    titan_logger.setLevel(logging.WARNING)
    rows: list[Row] = []
    for variant, overrides in VARIANTS.items():
        rows += _measure([*sys.argv[1:], *WITHOUT_ASSETS, *overrides], variant)
    if dist.get_rank() == 0:
        report = Report("ZeRO-1 step of this rank's shards", measure_machine(this_device()), rows)
        report.print()
        report.write(_dump_folder(sys.argv[1:]), "step")
    dist.destroy_process_group()


def _measure(arguments: list[str], variant: str) -> list[Row]:
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    trainer: Any = Trainer(ConfigManager().parse_args(arguments))
    step = _Step(trainer.optimizers)
    times: dict[str, list[float]] = {}
    for _ in range(WARM_UP + REPEATS):
        for phase, ms in step.run().items():
            times.setdefault(phase, []).append(ms)
    peer = "" if variant == FIRST else FIRST
    rows = [
        Row(f"{variant} {phase}", statistics.median(ms[WARM_UP:]), peer=peer and f"{peer} {phase}")
        for phase, ms in times.items()
    ]
    numel = step.numel
    trainer.close()
    del trainer, step
    gc.collect()
    return [*rows, _fused_adamw(numel, variant)]


class _Step:
    """An optimizer step of a model, on random gradients."""

    def __init__(self, optimizers: Any) -> None:
        self._optimizers = optimizers
        self._zero1s: list[Zero1] = optimizers.zero1s
        self._gradients = [_random_gradients(zero1) for zero1 in self._zero1s]

    @property
    def numel(self) -> int:
        """Elements that this rank updates, padding included."""
        mains = (main for zero1 in self._zero1s for main in zero1.main_parameters)
        return sum(local_tensor(main.detach()).numel() for main in mains)

    def run(self) -> dict[str, float]:
        """Milliseconds, by phase."""
        self._optimizers.zero_grad()
        phases: dict[str, Callable[[], None]] = {
            "backward: fold, reduce": self._backward,
            "clip": self._clip,
            "update, quantize": self._optimizers.step,
            "publish: gather, unfold": self._publish,
        }
        times = {phase: _seconds(run) * 1e3 for phase, run in phases.items()}
        return {**times, "step": sum(times.values())}

    def _backward(self) -> None:
        for zero1, gradients in zip(self._zero1s, self._gradients, strict=True):
            for _ in range(zero1.backwards_per_step):
                outputs = [leaf.view_as(leaf) for leaf, _ in gradients]
                torch.autograd.backward(outputs, [gradient for _, gradient in gradients])

    def _clip(self) -> None:
        for zero1 in self._zero1s:
            zero1.clip_grad_norm_(1.0)

    def _publish(self) -> None:
        for zero1 in self._zero1s:
            zero1.wait_for_publish()


def _random_gradients(zero1: Zero1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A gradient for each leaf, as autograd would deliver it."""
    pairs = []
    for leaf in zero1.leaves():
        local = local_tensor(leaf.detach())
        gradient = torch.randn(local.shape, dtype=local.dtype, device=local.device)
        if isinstance(leaf, DTensor):
            gradient = DTensor.from_local(
                gradient, leaf.device_mesh, leaf.placements, run_check=False
            )
        pairs.append((leaf, gradient))
    return pairs


def _fused_adamw(numel: int, variant: str) -> Row:
    ms = fused_adamw_ms(numel, this_device())
    name = f"AdamW(fused=True) on {variant}'s elements"
    return Row(name, ms, gbytes=ADAMW_BYTES * numel / 1e9, peer=f"{variant} update, quantize")


def _seconds(function: Callable[[], object]) -> float:
    """Of a call on all ranks: they start together."""
    _synchronize()
    dist.barrier()
    started = time.perf_counter()
    function()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _dump_folder(arguments: list[str]) -> Path:
    from torchtitan.config import ConfigManager

    config: Any = ConfigManager().parse_args(arguments)
    return Path(config.job.dump_folder)


if __name__ == "__main__":
    main()
