"""Puts our function in the place of one that TorchTitan's modules look up by name."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def swapped(modules: Iterable[ModuleType], name: str, replacement: Any) -> Iterator[None]:
    """Bind `name` to `replacement` in `modules` inside a `with` block."""
    originals = [(module, getattr(module, name)) for module in modules]
    try:
        for module, _ in originals:
            setattr(module, name, replacement)
        yield
    finally:
        for module, original in originals:
            setattr(module, name, original)
