"""What differs between what a model needs and what is stored, all of it in one error."""

from collections.abc import Iterable, Mapping
from pathlib import Path


class Mismatch(ValueError):
    """Stored weights that do not fit a model; the message has a line for each difference."""

    def __init__(self, path: Path, differences: Iterable[str]) -> None:
        super().__init__("\n  ".join([f"{path} does not fit the model:", *differences]))


def compare_shapes(
    needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """A line for each name that is missing, is too many or has another shape."""
    lines = [f"missing: {name} {needed[name]}" for name in needed if name not in found]
    lines += [f"unknown: {name} {found[name]}" for name in found if name not in needed]
    return lines + [
        f"{name}: shape {found[name]}, expected {needed[name]}"
        for name in needed
        if name in found and found[name] != needed[name]
    ]
