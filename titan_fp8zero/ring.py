"""The gradient buffers of a model: few, and reused after each reduce-scatter."""

from collections import deque
from typing import Protocol

import torch

RING_BUFFERS = 3
"""One that backward fills, and two whose reduce-scatters are under way."""


class Reduction(Protocol):
    """A reduce-scatter under way."""

    def wait_reduce(self) -> None:
        """Wait for it, and give its buffer back."""


class GradientRing:
    """Lends gradient buffers, with anything in them.

    Where backward runs ahead of the network, a buffer is lent only after the oldest reduce-scatter
    has ended. Gradients that are accumulated and not yet reduced keep their buffers, whatever
    their number.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._under_way: deque[Reduction] = deque()

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of this shape."""
        while len(self._under_way) >= RING_BUFFERS - 1:
            self._under_way.popleft().wait_reduce()
        free = self._free.get((torch.Size(shape), dtype))
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def reducing(self, reduction: Reduction) -> None:
        """Count a reduce-scatter that has started."""
        self._under_way.append(reduction)

    def give_back(self, reduction: Reduction, buffer: torch.Tensor) -> None:
        """Take a buffer back whose reduce-scatter has ended."""
        if reduction in self._under_way:
            self._under_way.remove(reduction)
        self._free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
