"""Compute weights: what forward reads in place of the registered, sharded main parameters.

A module that owns parameters keeps its compute weights in a plain dict, `_compute_weights`, by
parameter name: an `FP8Weight` where the module multiplies in FP8, an ordinary leaf otherwise.
Plain data, because `torch.compile`, GEMM kernels and DeepSeek's file format all see plain tensors.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import Placement


class FP8Weight(NamedTuple):
    """A weight as FP8 data, and the leaf on which autograd delivers its gradient."""

    codes: torch.Tensor
    """e4m3, the weight's shape `[R, C]` or `[E, R, C]`; no gradient of its own."""
    scale_inv: torch.Tensor
    """fp32 `[..., ceil(R/128), ceil(C/128)]`."""
    carrier: torch.Tensor
    """Leaf of the weight's shape and the gradient's dtype; the gradient carrier has no storage."""
    transposed: torch.Tensor | None = None
    """The codes with the last two dims swapped, contiguous, where a copy is kept for backward."""
    placements: tuple[Placement, ...] = ()
    """Over the mesh dims of model parallelism (TP, EP), if this is the local shard of a weight."""


def gradient_carrier(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A leaf of `shape` and `dtype` that has the storage of one element.

    Not a Parameter: `deepcopy` and `to_empty` would make it dense. Not an FP8 leaf: compiled,
    AOTAutograd rounds such a gradient through e4m3 and small ones become zero.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_(True)


@functools.cache
def reader_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Subclass of `base` whose parameters `names` read as compute weights.

    One class per (base, names): torch.compile guards on the type, and a class an instance would
    recompile every layer.
    """

    def reader(name: str) -> property:
        return property(lambda module: module._compute_weights[name])

    return type(f"ZeRO1{base.__name__}", (base,), {name: reader(name) for name in names})
