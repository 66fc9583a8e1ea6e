"""Training throughput and memory of configs, beside the first of them."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from titan_fp8zero.bench.measure import Machine, measure_machine, this_device
from titan_fp8zero.console import stdout_console
from titan_fp8zero.job import BadInput, load_job
from titan_fp8zero.metrics_file import read_metrics

ALIKE = [
    *("--metrics.log_freq", "1", "--checkpoint.no-enable", "--validation.no-enable"),
    "--profiling.no-enable-profiling",
]


@dataclass(frozen=True)
class Throughput:
    """Of one config, per rank."""

    config: str
    tokens_per_s: float
    """Median over the second half of the steps."""
    memory_gib: float
    """Peak."""


def bench_train(
    configs: list[Path], overrides: list[str], steps: int, nproc: int | None, out: Path
) -> None:
    """Trains each config for some steps; prints, and writes `train.json` and `train.png`.

    Raises:
        BadInput: a config does not fit, or logs no metrics.
        RanksFailed: a rank of a run failed.
    """
    if steps < 4:
        raise BadInput(f"--steps {steps}: at least 4 are needed, of which the first half warms up")
    measured = [_train(config, overrides, steps, nproc, out) for config in configs]
    machine = measure_machine(this_device())
    _print(machine, measured)
    out.mkdir(parents=True, exist_ok=True)
    record = {"machine": asdict(machine), "throughputs": [asdict(one) for one in measured]}
    (out / "train.json").write_text(json.dumps(record, indent=1) + "\n")
    _plot(measured, out / "train.png")


def _train(
    config: Path, overrides: list[str], steps: int, nproc: int | None, out: Path
) -> Throughput:
    folder = ["--job.dump_folder", str(out / config.stem), "--training.steps", str(steps)]
    job = load_job(config, [*overrides, *ALIKE, *folder], nproc)
    job.metrics_file.unlink(missing_ok=True)
    job.train()
    steps_logged = [line for line in read_metrics(job.metrics_file) if "tokens_per_s" in line]
    if not steps_logged:
        raise BadInput(f"{config} logs no metrics: it needs [experimental] custom_import")
    last = steps_logged[len(steps_logged) // 2 :]
    of_all_ranks = statistics.median(line["tokens_per_s"] for line in last)
    return Throughput(
        config.stem,
        of_all_ranks / job.nproc,
        max(line["memory"] or 0.0 for line in steps_logged),
    )


def _print(machine: Machine, measured: list[Throughput]) -> None:
    console = stdout_console()
    console.print(str(machine))
    table = Table(title="Training, per rank")
    table.add_column("config")
    for header in ("tokens/s", "times the first", "peak GiB"):
        table.add_column(header, justify="right")
    for one in measured:
        ratio = one.tokens_per_s / measured[0].tokens_per_s
        table.add_row(
            one.config, f"{one.tokens_per_s:,.0f}", f"{ratio:.3f}", f"{one.memory_gib:.2f}"
        )
    console.print(table)


def _plot(measured: list[Throughput], image: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: it needs no display

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.barh([one.config for one in measured], [one.tokens_per_s for one in measured])
    axes.set_xlabel("tokens/s per rank")
    figure.savefig(image, dpi=120)
