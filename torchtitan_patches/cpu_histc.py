"""Counts integers with `torch.histc` on CPUs.

TorchTitan's MoE router counts tokens per expert by `torch.histc` of int64 expert indices, for
which torch has a CUDA kernel and no CPU kernel. The replacement counts them as float32, exact up
to 2^24 tokens in a bin.
"""

from typing import Any

import torch

from torchtitan_patches.guard import (
    check_callable,
    check_versions,
    is_applied,
    log_applied,
    mark,
    refuse,
)

NAME = "cpu_histc"


def apply() -> None:
    """Replaces `torch.histc`."""
    if is_applied(NAME, torch.histc):
        return
    check_versions(NAME)
    histc = check_callable(NAME, torch, "histc", parameters=None)
    if _counts_integers(histc):
        refuse(NAME, "torch.histc counts integers on CPUs by itself now")

    def histc_of_integers(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.device.type == "cpu" and not input.is_floating_point():
            return histc(input.float(), *args, **kwargs).to(input.dtype)
        return histc(input, *args, **kwargs)

    torch.histc = mark(NAME, histc_of_integers)
    log_applied(NAME, "torch.histc counts integers on CPUs")


def _counts_integers(histc: Any) -> bool:
    try:
        histc(torch.tensor([0, 1]), bins=2, min=0, max=2)
    except (RuntimeError, NotImplementedError):
        return False
    return True
