"""`BlockShard`: a `Shard(0)` that cuts a folded tensor only between tiles."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


class BlockShard(Shard):
    """Shards dim 0 of a folded tensor, the same number of tiles (or rows) on every rank.

    Because the split is even its layout is that of `Shard(0)`: DTensor relabels the results of
    ordinary ops to plain `Shard(0)`, which is then true. Uneven cuts would crash ranks there.

    Redistributes from `Partial("sum")`, `Partial("avg")` and `Replicate()`, and to `Replicate()`.
    Raises ValueError where dim 0 is no multiple of the mesh size (pad it), TypeError when 1-byte
    data would be reduced, NotImplementedError towards another sharded dim.
    """

    def __init__(self, dim: int = 0) -> None:
        if dim != 0:
            raise ValueError(f"BlockShard shards the tile dim, 0; got dim={dim}")
        super().__init__(dim)

    # Equal to Shard(0), because DTensorSpec compares placements with Shard(dim) when it is built.
    # Another hash than Shard(0), or the redistribute and sharding caches of the two would mix and
    # plain Shard's code would run for this class.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockShard) or (type(other) is Shard and other.dim == 0)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("BlockShard")

    def __repr__(self) -> str:
        return "BlockShard()"

    def __str__(self) -> str:
        return "BS"

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return "BlockShard()", {"BlockShard": BlockShard}

    def __reduce__(self) -> tuple[type["BlockShard"], tuple[()]]:
        return BlockShard, ()

    def _check_even(self, size: int, num_ranks: int) -> None:
        if size % num_ranks:
            raise ValueError(
                f"BlockShard needs dim 0 ({size}) to be a multiple of the mesh size ({num_ranks}): "
                "pad the folded tensor"
            )

    def _split_tensor(
        self,
        tensor: torch.Tensor,
        num_chunks: int,
        *,
        with_padding: bool = True,
        contiguous: bool = True,
    ) -> tuple[list[torch.Tensor], list[int]]:
        self._check_even(tensor.size(0), num_chunks)
        return super()._split_tensor(
            tensor, num_chunks, with_padding=with_padding, contiguous=contiguous
        )

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        self._check_even(tensor.size(0), mesh.size(mesh_dim))
        if tensor.element_size() == 1:
            raise TypeError(
                f"cannot reduce {tensor.dtype}: a sum of 1-byte data loses it; reduce bf16 or fp32"
            )
        return super()._reduce_shard_tensor(tensor, mesh, reduce_op, mesh_dim)

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[int | torch.SymInt],
    ) -> torch.Tensor:
        self._check_even(int(current_logical_shape[0]), mesh.size(mesh_dim))
        if local_tensor.element_size() > 1 or local_tensor.dtype == torch.uint8:
            return super()._to_replicate_tensor(local_tensor, mesh, mesh_dim, current_logical_shape)
        # gloo rejects float8: it travels as bytes.
        wire = local_tensor.contiguous().view(torch.uint8)
        gathered = super()._to_replicate_tensor(wire, mesh, mesh_dim, current_logical_shape)
        return wait_tensor(gathered).view(local_tensor.dtype)

    def _to_new_shard_dim(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError(
            "BlockShard cannot become Shard of another dim: redistribute to Replicate() first"
        )
