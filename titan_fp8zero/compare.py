"""Trains two configs on the same data, seed and steps, and lays their losses side by side."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from titan_fp8zero.console import stdout_console
from titan_fp8zero.job import BadInput, Job, load_job
from titan_fp8zero.metrics_file import plot_losses, read_metrics

DEFAULT_SEED = 42
LAST_STEPS = 20
"""Over how many last steps the losses are averaged."""

SHOWN_ROWS = 20
"""At most about so many steps are printed; the files have all."""

_SAME = (
    "training.dataset",
    "training.dataset_path",
    "training.seq_len",
    "training.local_batch_size",
    "training.global_batch_size",
    "model.hf_assets_path",
)
"""What decides, with the number of ranks that read data, which tokens a step trains on."""


@dataclass(frozen=True)
class Run:
    """What a training run left in its metrics file."""

    config: str
    losses: dict[int, float | None]
    tokens_per_s: float

    @property
    def last_loss(self) -> float | None:
        """Mean over the last steps, None if one of them was not finite."""
        last = list(self.losses.values())[-LAST_STEPS:]
        return None if None in last else statistics.fmean(loss for loss in last if loss is not None)


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same steps. A relative difference is of `b` to `a`, as a share of `a`."""

    a: Run
    b: Run

    def rows(self) -> list[tuple[int, float | None, float | None, float | None]]:
        """Step, loss of a, loss of b, relative difference."""
        return [
            (step, loss, self.b.losses[step], _relative(loss, self.b.losses[step]))
            for step, loss in self.a.losses.items()
        ]

    @property
    def last_loss_difference(self) -> float | None:
        return _relative(self.a.last_loss, self.b.last_loss)


def _relative(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else (b - a) / a


def compare(a: Path, b: Path, steps: int | None, nproc: int | None, out: Path) -> Comparison:
    """Trains `a`, then `b`, and writes `compare.json`, `compare.md` and `compare.png` into `out`.

    Both log every step and start from scratch, without checkpoints.

    Raises:
        BadInput: the configs do not train on the same tokens, or write no metrics.
        RanksFailed: a rank of a run failed.
    """
    jobs = _load(a, b, steps, nproc, out)
    _check_same_data(*jobs)
    comparison = Comparison(*[_train(job) for job in jobs])
    _write(comparison, out)
    return comparison


def _train(job: Job) -> Run:
    print(f"=== training {job.config_file}", flush=True)
    job.metrics_file.unlink(missing_ok=True)  # of an earlier comparison
    job.train()
    return _read(job)


def _load(a: Path, b: Path, steps: int | None, nproc: int | None, out: Path) -> tuple[Job, Job]:
    if a.resolve() == b.resolve():
        raise BadInput(f"both configs are {a}: name two")
    same = ["--metrics.log_freq", "1", "--checkpoint.no-enable"]
    if steps is not None:
        same += ["--training.steps", str(steps)]
    seed = load_job(a, same, nproc).config.debug.seed
    same += ["--debug.seed", str(DEFAULT_SEED if seed is None else seed)]
    job_a, job_b = (
        load_job(config, [*same, "--job.dump_folder", str(out / name)], nproc)
        for config, name in ((a, f"a_{a.stem}"), (b, f"b_{b.stem}"))
    )
    return job_a, job_b


def _check_same_data(a: Job, b: Job) -> None:
    keys = (*_SAME, "training.steps")
    differing = [
        f"{key}: {_get(a.config, key)!r} and {_get(b.config, key)!r}"
        for key in keys
        if _get(a.config, key) != _get(b.config, key)
    ]
    if a.batch_degree != b.batch_degree:
        differing.append(f"ranks that read data: {a.batch_degree} and {b.batch_degree}")
    if differing:
        raise BadInput(
            f"{a.config_file} and {b.config_file} do not train on the same data, their losses "
            f"cannot be compared; they differ in {'; '.join(differing)}"
        )


def _get(config: Any, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _read(job: Job) -> Run:
    lines = [metrics for metrics in read_metrics(job.metrics_file) if "loss" in metrics]
    if not lines:
        raise BadInput(
            f"{job.config_file} wrote no losses to {job.metrics_file}; its [experimental] "
            'custom_import has to be "titan_fp8zero.titan", or a module that imports it'
        )
    speeds = [metrics["tokens_per_s"] for metrics in lines]
    return Run(
        config=str(job.config_file),
        losses={metrics["step"]: metrics["loss"] for metrics in lines},
        tokens_per_s=statistics.median(speeds),  # the first steps, which warm up, do not count
    )


def _write(comparison: Comparison, out: Path) -> None:
    a, b = comparison.a, comparison.b
    summary = {
        "a": asdict(a),
        "b": asdict(b),
        "steps": [
            dict(zip(("step", "loss_a", "loss_b", "relative_difference"), row, strict=True))
            for row in comparison.rows()
        ],
        "last_steps": min(LAST_STEPS, len(a.losses)),
        "last_loss_a": a.last_loss,
        "last_loss_b": b.last_loss,
        "last_loss_relative_difference": comparison.last_loss_difference,
    }
    (out / "compare.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "compare.md").write_text(_markdown(comparison))
    curves = {"a": a, "b": b}
    plot_losses(
        {f"{name}: {run.config}": run.losses.items() for name, run in curves.items()},
        out / "compare.png",
    )


HEADER = ("step", "loss A", "loss B", "relative difference")


def _cells(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (str(step), _loss(a), _loss(b), _percent(difference))
        for step, a, b, difference in comparison.rows()
    ]


def _summary_cells(comparison: Comparison) -> list[tuple[str, ...]]:
    a, b = comparison.a, comparison.b
    last = min(LAST_STEPS, len(a.losses))
    return [
        (
            f"mean of last {last}",
            _loss(a.last_loss),
            _loss(b.last_loss),
            _percent(comparison.last_loss_difference),
        ),
        (
            "tokens/s (median)",
            f"{a.tokens_per_s:,.0f}",
            f"{b.tokens_per_s:,.0f}",
            _percent(_relative(a.tokens_per_s, b.tokens_per_s)),
        ),
    ]


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.5f}"


def _percent(difference: float | None) -> str:
    return "" if difference is None else f"{difference:+.3%}"


def _markdown(comparison: Comparison) -> str:
    rows = [HEADER, ("---:",) * 4, *_summary_cells(comparison), *_cells(comparison)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"A: {comparison.a.config}\n\nB: {comparison.b.config}\n\n{table}\n"


def print_comparison(comparison: Comparison) -> None:
    """Prints the table, of a long run not every step."""
    table = Table(title=f"A: {comparison.a.config}\nB: {comparison.b.config}")
    for name in HEADER:
        table.add_column(name, justify="right")
    cells = _cells(comparison)
    every = -(-len(cells) // SHOWN_ROWS)
    for row in cells[::-every][::-1]:
        table.add_row(*row)
    table.add_section()
    for row in _summary_cells(comparison):
        table.add_row(*row)
    stdout_console().print(table)
