"""Over which mesh dims a main parameter is sharded, replicated, or left to model parallelism."""

import functools
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.bucket import DataParallelMesh
from titan_fp8zero.placement import BlockShard


@dataclass(frozen=True)
class WeightMesh:
    """The mesh of a main parameter, and which dims of it are data-parallel."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    """Of the main parameter, over all dims of `mesh`."""
    data_parallel: DataParallelMesh
    model_parallel: tuple[tuple[str, Placement], ...]
    """Dims that the compute weight keeps (TP, EP), and their placement there."""

    def main_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap a rank's units as the sharded tensor they are part of."""
        if self.mesh is None:
            return local
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def compute_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap a compute weight as the tensor that model parallelism expects to read."""
        if not self.model_parallel:
            return local
        assert self.mesh is not None
        names, placements = zip(*self.model_parallel, strict=True)
        mesh = self.mesh if self.mesh.mesh_dim_names == names else self.mesh[names]
        return DTensor.from_local(local, mesh, placements, run_check=False)

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A rank's gradient of a compute weight; partial sums over a model-parallel dim (those of
        a norm under sequence parallelism, say) are added up."""
        if not isinstance(gradient, DTensor):
            return gradient
        placements = [placement for _, placement in self.model_parallel]
        return gradient.redistribute(placements=placements).to_local()

    def cuts_blocks(self, local_shape: tuple[int, ...]) -> bool:
        """Whether model parallelism cuts a weight inside of blocks."""
        return any(
            isinstance(placement, Shard)
            and placement.dim >= len(local_shape) - 2
            and local_shape[placement.dim] % BLOCK != 0
            for _, placement in self.model_parallel
        )

    def whole_of(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the weight of which a model-parallel rank holds `shape`, and where it starts."""
        whole, offset = list(shape), [0] * len(shape)
        for name, placement in self.model_parallel:
            if isinstance(placement, Shard):
                assert self.mesh is not None
                mesh = self.mesh[name]
                offset[placement.dim] = mesh.get_local_rank() * shape[placement.dim]
                whole[placement.dim] *= mesh.size()
        return tuple(whole), tuple(offset)

    def gather(self, parameter: torch.Tensor) -> torch.Tensor:
        """The local weight that one model-parallel rank holds whole."""
        if not isinstance(parameter, DTensor):
            return parameter
        kept = dict(self.model_parallel)
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = [kept.get(name, Replicate()) for name in names]
        return parameter.redistribute(placements=placements).to_local()

    def scatter(self, local: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        """The parameter with these placements that `gather` makes a local weight of."""
        if not placements:
            return local
        assert self.mesh is not None
        names = self.mesh.mesh_dim_names or ("",) * self.mesh.ndim
        kept = dict(self.model_parallel)
        shape, _ = self.whole_of(tuple(local.shape))
        for mesh_dim, (name, placement) in enumerate(zip(names, placements, strict=True)):
            if name in kept or isinstance(placement, Replicate):
                continue
            dim: int = placement.dim  # type: ignore[attr-defined]
            chunks = local.chunk(self.mesh.size(mesh_dim), dim)
            rank = self.mesh.get_local_rank(mesh_dim)
            local = chunks[rank] if rank < len(chunks) else local.narrow(dim, 0, 0)
        return DTensor.from_local(
            local.contiguous(),
            self.mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )


def weight_mesh_of(
    fqn: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
) -> WeightMesh:
    """The mesh of a weight's main parameter: the data-parallel one, and the weight's own dims."""
    if not isinstance(parameter, DTensor):
        if mesh is None:
            return WeightMesh(None, (), DataParallelMesh(None, None), ())
        return _place(mesh, tuple(range(mesh.ndim)), ())
    names = parameter.device_mesh.mesh_dim_names or ()
    known = {name for m in (mesh, expert_mesh) if m is not None for name in m.mesh_dim_names or ()}
    data_parallel = tuple(dim for dim, name in enumerate(names) if name in known)
    if known and not data_parallel:
        raise ValueError(
            f"{fqn} is a DTensor over mesh dims {names}, none of which is a data-parallel dim "
            f"({sorted(known)}): name them in mesh or expert_mesh"
        )
    model_parallel = tuple(
        (name, parameter.placements[dim])
        for dim, name in enumerate(names)
        if dim not in data_parallel
    )
    return _place(parameter.device_mesh, data_parallel, model_parallel)


@functools.cache  # so that the weights of a mesh share one, and its process groups
def _place(
    mesh: DeviceMesh,
    data_parallel: tuple[int, ...],
    model_parallel: tuple[tuple[str, Placement], ...],
) -> WeightMesh:
    """The last data-parallel dim shards, one in front of it replicates (HSDP)."""
    # Model-parallel shards lie end to end in dim 0, so that a norm over the mesh counts each once.
    placements: list[Placement] = [
        Shard(0)
        if name in dict(model_parallel) and dict(model_parallel)[name].is_shard()
        else Replicate()
        for name in mesh.mesh_dim_names or [""] * mesh.ndim
    ]
    shard = replicate = None
    if data_parallel:
        *replicate_dims, shard_dim = data_parallel
        placements[shard_dim] = BlockShard()
        shard = _dim_mesh(mesh, shard_dim)
        replicate = _dim_mesh(mesh, replicate_dims[0]) if replicate_dims else None
    return WeightMesh(mesh, tuple(placements), DataParallelMesh(shard, replicate), model_parallel)


def _dim_mesh(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(
            'a mesh of several dims needs mesh_dim_names, ("replicate", "shard") say: '
            "give them to init_device_mesh"
        )
    return mesh[mesh.mesh_dim_names[dim]]


def local_shape(fqn: str, parameter: nn.Parameter, mesh: WeightMesh) -> tuple[int, ...]:
    """Shape of what one model-parallel rank holds whole."""
    shape = list(parameter.shape)
    for name, placement in mesh.model_parallel:
        if not isinstance(placement, Shard):
            continue
        assert mesh.mesh is not None
        ranks = mesh.mesh[name].size()
        if shape[placement.dim] % ranks:
            raise ValueError(
                f"{fqn}: dim {placement.dim} of shape {tuple(parameter.shape)} must be a multiple "
                f"of the size {ranks} of mesh dim {name!r}"
            )
        shape[placement.dim] //= ranks
    return tuple(shape)
