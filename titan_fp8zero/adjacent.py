"""Tensors that lie end to end in memory, seen as one: a kernel then takes them in one launch."""

from collections.abc import Iterator, Sequence

import torch


def adjacent_runs(columns: Sequence[Sequence[torch.Tensor]]) -> Iterator[slice]:
    """Cut rows into runs within which every column lies end to end in memory.

    `columns` are equally long sequences of contiguous tensors.
    """
    start = 0
    for row in range(1, len(columns[0])):
        if not all(_follows(column[row - 1], column[row]) for column in columns):
            yield slice(start, row)
            start = row
    yield slice(start, len(columns[0]))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The view of tensors that lie end to end, concatenated along their first dim."""
    first = tensors[0]
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    return (
        after.data_ptr() == before.data_ptr() + before.nbytes
        and after.dtype == before.dtype
        and after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    )
