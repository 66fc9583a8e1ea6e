"""Errors of checkpoints, which all ranks raise together: none waits for one that has failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

_T = TypeVar("_T")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or must not be loaded; all ranks raise the same."""


def on_all_ranks(action: Callable[[], _T]) -> _T:
    """Run on every rank; where it fails on any of them, all raise one CheckpointError.

    A collective over the default process group, if there is one. `action` holds none itself.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        error = _describe(raised)
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    told = dict.fromkeys(error for error in errors if error is not None)
    if told:
        raise CheckpointError("\n".join(told))
    return result  # type: ignore[return-value]


@contextmanager
def told_by_all(what: str) -> Iterator[None]:
    """DCP's exceptions, which reach all ranks, as a CheckpointError that says what went wrong."""
    try:
        yield
    except CheckpointException as error:
        ranks: dict[str, list[int]] = {}
        for rank, (cause, _) in error.failures.items():
            ranks.setdefault(_describe(cause), []).append(rank)
        told = "; ".join(f"rank {', '.join(map(str, r))}: {text}" for text, r in ranks.items())
        raise CheckpointError(f"{what}: {told}") from error


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else repr(error)
