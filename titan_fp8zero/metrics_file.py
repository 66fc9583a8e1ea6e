"""`metrics.jsonl`, a run's metrics for programs: one JSON object a line, one line a logged step or
a validation.

    {"step": 10, "loss": 6.1, "grad_norm": 1.2, "tokens_per_s": 1800.0, "memory": 1.1, "lr": 8e-4}
    {"step": 10, "validation_loss": 6.2}

A number that is not finite is null.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes the file. Of an earlier run it keeps the steps before `first_step`."""

    def __init__(self, path: Path, first_step: int) -> None:
        earlier = read_metrics(path) if first_step > 1 else []
        kept = [metrics for metrics in earlier if metrics["step"] < first_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.new")
        self._stream = aside.open("w", encoding="utf-8")
        for metrics in kept:
            self.write(metrics)
        aside.replace(path)

    def write(self, metrics: dict[str, Any]) -> None:
        """Appends a line, for others to read before this returns."""
        finite = {key: value if _is_finite(value) else None for key, value in metrics.items()}
        self._stream.write(json.dumps(finite, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, none if there is no file.

    Raises:
        ValueError: the file has a line that is none of ours.
    """
    if not path.exists():
        return []
    try:
        return _parse(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a metrics file ({error}): move it away") from None


def _parse(content: bytes) -> list[dict[str, Any]]:
    # What follows the last line end is half a line, of a run that was killed or is writing it.
    metrics = [json.loads(line) for line in content.split(b"\n")[:-1]]
    if not all(isinstance(line, dict) and "step" in line for line in metrics):
        raise ValueError('a line is not an object with a "step"')
    return metrics


class MetricsFollower:
    """Reads what a run that is about to start appends to the file, while it does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = path.stat().st_ino if path.exists() else None
        self._offset = path.stat().st_size if path.exists() else 0
        self._earlier = _parse_or_none(path)

    def read(self) -> list[dict[str, Any]]:
        """The whole lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            inode = self._path.stat().st_ino
            if inode != self._inode:  # the run has put its own file there, with kept lines in it
                self._inode, self._offset = inode, 0
            stream.seek(self._offset)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [metrics for metrics in _parse(whole) if metrics not in self._earlier]


def _parse_or_none(path: Path) -> list[dict[str, Any]]:
    """What the run may keep of the file; the run itself says what is wrong with it."""
    try:
        return read_metrics(path)
    except ValueError:
        return []


def plot_losses(curves: dict[str, Iterable[tuple[int, float | None]]], image: Path) -> None:
    """Draws named losses over steps into an image file."""
    from matplotlib.figure import Figure  # not pyplot: it needs no display and leaves no state

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        points = [(step, loss) for step, loss in curve if loss is not None]
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 50 else "")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(image, dpi=120)
