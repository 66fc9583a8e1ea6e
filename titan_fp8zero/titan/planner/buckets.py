"""A model part's buckets, as `shard_zero1` makes them, with the mesh and the bytes of each."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.distributed.tensor import Placement, Shard

from titan_fp8zero.blocks import BLOCK, num_tiles
from titan_fp8zero.bucket import Precision
from titan_fp8zero.layout import BucketLayout, Strategy, plan_buckets
from titan_fp8zero.main_parameter import Weight, weight_spec
from titan_fp8zero.titan.parallelize import Sharding
from titan_fp8zero.titan.planner.costs import RankBytes, rank_bytes
from titan_fp8zero.titan.planner.model import ModelPart


class BucketMesh(NamedTuple):
    """The mesh of a bucket, for one pipeline rank."""

    shard_dim: str
    num_ranks: int
    """Of the shard dim."""
    replicas: int
    """Of HSDP's replicate dim."""
    model_parallel: tuple[tuple[str, int], ...]
    """TP and EP dims of the weights, and their sizes."""

    def __str__(self) -> str:
        replicated = [("dp_replicate", self.replicas)] if self.replicas > 1 else []
        dims = [*replicated, (self.shard_dim, self.num_ranks), *self.model_parallel]
        return " x ".join(f"{name} {size}" for name, size in dims)


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of a rank."""

    stage: int
    mesh: BucketMesh
    layout: BucketLayout
    precision: Precision

    @cached_property
    def bytes(self) -> RankBytes:
        return rank_bytes(self.layout, self.precision)

    @cached_property
    def owned_units(self) -> list[int]:
        """Real units, by rank of the shard dim; the rest of `units_per_rank` is padding."""
        owned = [0] * self.layout.num_ranks
        for main in self.layout.mains:
            for member in main.members:
                for run in main.runs(member):
                    owned[run.rank] += run.units
        return owned


class SplitBlocks(NamedTuple):
    """An FP8 weight whose blocks under TP are not those of the unsharded weight."""

    fqn: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    tiles: int
    """Of the unsharded weight."""
    tiles_of_all_ranks: int
    """Of its shards together: where a local size is no multiple of 128, each shard is padded."""


def planned_buckets(part: ModelPart, strategy: Strategy) -> Iterator[PlannedBucket]:
    """The buckets that `shard_zero1` makes of a model part."""
    precision = _precision(part.sharding)
    options = part.sharding.options
    meshes = {weight.fqn: _bucket_mesh(weight) for weight in part.weights}
    for layout in plan_buckets(
        [weight_spec(weight, precision) for weight in part.weights],
        strategy=strategy,
        bucket_bytes=options.bucket_mib << 20,
        padding_limit=options.padding_limit,
    ):
        mesh = meshes[layout.members[0].weight.fqn]
        yield PlannedBucket(part.stage, mesh, layout, precision)


def _precision(sharding: Sharding) -> Precision:
    options = sharding.options
    return Precision(
        sharding.compute_dtype,
        sharding.gradient_dtype,
        options.scale_format,
        options.main_round == "bf16",
    )


def _bucket_mesh(weight: Weight) -> BucketMesh:
    data_parallel, mesh = weight.mesh.data_parallel, weight.mesh.mesh
    if mesh is None or data_parallel.shard is None:
        return BucketMesh("one rank", 1, 1, ())
    sizes: dict[str, int] = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    (shard_dim,) = data_parallel.shard.mesh_dim_names or ()
    replicas = data_parallel.replicate.size() if data_parallel.replicate is not None else 1
    model_parallel = tuple((name, sizes[name]) for name, _ in weight.mesh.model_parallel)
    return BucketMesh(shard_dim, sizes[shard_dim], replicas, model_parallel)


def split_blocks(weight: Weight) -> SplitBlocks | None:
    """What TP does to the blocks of an FP8 weight; None where they stay those of the whole."""
    if not any(_cuts_blocks(weight, placement) for _, placement in weight.mesh.model_parallel):
        return None
    shape = tuple(weight.parameter.shape)
    shards = math.prod(shape) // math.prod(weight.shape)
    return SplitBlocks(
        weight.fqn, shape, weight.shape, num_tiles(shape), shards * num_tiles(weight.shape)
    )


def _cuts_blocks(weight: Weight, placement: Placement) -> bool:
    if not isinstance(placement, Shard) or placement.dim < len(weight.shape) - 2:
        return False
    return weight.shape[placement.dim] % BLOCK != 0
