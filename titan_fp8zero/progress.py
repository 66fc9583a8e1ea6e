"""Shows how a training run gets on: a live bar on a terminal, else a line for each logged step."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from titan_fp8zero.metrics_file import MetricsFollower

POLL_SECONDS = 0.5


@contextmanager
def show_progress(metrics_file: Path, total_steps: int) -> Iterator[None]:
    """While in the context, shows the steps that a run logs to `metrics_file`."""
    if not sys.stdout.isatty():
        with _follow(metrics_file, total_steps, lambda step, text: print(text, flush=True)):
            yield
        return
    columns = (TextColumn("{task.description}"), BarColumn())
    # It passes on what others write to stdout meanwhile, above the bar.
    with Progress(*columns, console=Console()) as bar:
        task = bar.add_task("starting", total=total_steps)

        def show(step: int, text: str) -> None:
            bar.update(task, completed=step, description=text)

        with _follow(metrics_file, total_steps, show):
            yield


@contextmanager
def _follow(
    metrics_file: Path, total_steps: int, show: Callable[[int, str], None]
) -> Iterator[None]:
    follower = MetricsFollower(metrics_file)
    pace = _Pace(total_steps)
    ended = threading.Event()

    def show_new() -> None:
        for metrics in follower.read():
            if "loss" in metrics:
                show(metrics["step"], _describe(metrics, total_steps, pace.eta(metrics["step"])))

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            show_new()
        show_new()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _describe(metrics: dict[str, Any], total_steps: int, eta: str) -> str:
    loss = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
    return (
        f"step {metrics['step']}/{total_steps}  loss {loss}  "
        f"{metrics['tokens_per_s']:,.0f} tokens/s  ETA {eta}"
    )


class _Pace:
    """How long the remaining steps will take, at the pace since the first step seen."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._first: tuple[int, float] | None = None

    def eta(self, step: int) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        first_step, start = self._first
        if step == first_step:
            return "unknown"
        seconds = (now - start) / (step - first_step) * (self._total_steps - step)
        return str(timedelta(seconds=round(seconds)))
