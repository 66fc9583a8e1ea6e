"""Tensor parallelism: from the DTensors around a linear layer to the local shards it multiplies.

A weight `[N, K]` on a tensor-parallel mesh is `Shard(0)` (ColwiseParallel), `Shard(1)`
(RowwiseParallel), or `Replicate()`. Shards multiply as plain tensors, because blocks and their
scales are those of the local shard; the placements of x and of the product follow from the weight's
(Megatron-LM, arXiv:1909.08053).
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def local_operand(x: DTensor, weight: Placement) -> torch.Tensor:
    """The part of x `[..., K]` that the local shard of the weight multiplies.

    Raises ValueError for an x that is not placed as the weight needs it.
    """
    last = Shard(x.ndim - 1)
    needed = last if weight == Shard(1) else Replicate()
    if x.placements != (needed,):
        raise ValueError(
            f"a weight placed {weight} multiplies an input placed {needed}, got {x.placements}: "
            "redistribute the input, with ColwiseParallel or RowwiseParallel say"
        )
    # Every shard of the output features adds its part to the gradient of x.
    gradient = Partial() if weight == Shard(0) else needed
    return x.to_local(grad_placements=[gradient])


def product(local: torch.Tensor, x: DTensor, weight: Placement) -> DTensor:
    """The local product `[..., N]` as the DTensor it is part of."""
    placement: Placement = Replicate()
    if weight == Shard(0):
        placement = Shard(local.ndim - 1)
    elif weight == Shard(1):
        placement = Partial()
    return DTensor.from_local(local, x.device_mesh, [placement], run_check=False)
