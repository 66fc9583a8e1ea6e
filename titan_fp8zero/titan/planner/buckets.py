"""A model part's buckets, as `shard_zero1` makes them, with the mesh and the bytes of each."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from titan_fp8zero.blocks import num_tiles
from titan_fp8zero.bucket import Precision
from titan_fp8zero.layout import BucketLayout, Strategy, plan_buckets
from titan_fp8zero.main_parameter import Weight, weight_spec
from titan_fp8zero.titan.parallelize import EXPERT_DIM, Sharding
from titan_fp8zero.titan.planner.costs import RankBytes, rank_bytes
from titan_fp8zero.titan.planner.model import ModelPart


class BucketMesh(NamedTuple):
    """The mesh of a bucket, for one pipeline rank."""

    shard_dim: str | None
    """None where one rank has all."""
    num_ranks: int
    """Of the shard dim."""
    replicas: int
    """Of HSDP's replicate dim."""
    model_parallel: tuple[tuple[str, int], ...]
    """TP and EP dims of the weights, and their sizes."""

    def __str__(self) -> str:
        replicated = [("dp_replicate", self.replicas)] if self.replicas > 1 else []
        sharded = [(self.shard_dim, self.num_ranks)] if self.shard_dim is not None else []
        dims = [*replicated, *sharded, *self.model_parallel]
        return " x ".join(f"{name} {size}" for name, size in dims) or "one rank"

    @property
    def has_experts(self) -> bool:
        return EXPERT_DIM in dict(self.model_parallel)


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of a rank."""

    stage: int
    mesh: BucketMesh
    layout: BucketLayout
    precision: Precision
    moment_dtype: torch.dtype
    keep_transposed: bool

    @cached_property
    def bytes(self) -> RankBytes:
        return rank_bytes(self.layout, self.precision, self.moment_dtype, self.keep_transposed)

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
    options = part.sharding.options
    precision = _precision(part.sharding)
    moment_dtype = TORCH_DTYPE_MAP[options.moment_dtype]
    keep_transposed = options.transposed_weight == "cached"
    meshes = {weight.fqn: _bucket_mesh(weight) for weight in part.weights}
    for layout in plan_buckets(
        [weight_spec(weight, precision) for weight in part.weights],
        strategy=strategy,
        bucket_bytes=options.bucket_mib << 20,
        padding_limit=options.padding_limit,
    ):
        mesh = meshes[layout.members[0].weight.fqn]
        yield PlannedBucket(part.stage, mesh, layout, precision, moment_dtype, keep_transposed)


def _precision(sharding: Sharding) -> Precision:
    options = sharding.options
    return Precision(
        compute=sharding.compute_dtype,
        accumulate=TORCH_DTYPE_MAP[options.accumulate_dtype],
        reduce=TORCH_DTYPE_MAP[options.reduce_dtype],
        scale_format=options.scale_format,
        round_main_to_bf16=options.main_round == "bf16",
    )


def _bucket_mesh(weight: Weight) -> BucketMesh:
    mesh, (shard, replicate) = weight.mesh.mesh, weight.mesh.data_parallel
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh else {}
    return BucketMesh(
        shard_dim=shard.mesh_dim_names[0] if shard and shard.mesh_dim_names else None,
        num_ranks=weight.mesh.data_parallel.num_ranks,
        replicas=replicate.size() if replicate else 1,
        model_parallel=tuple((name, sizes[name]) for name, _ in weight.mesh.model_parallel),
    )


def split_blocks(weight: Weight) -> SplitBlocks | None:
    """What TP does to the blocks of an FP8 weight; None where they stay those of the whole."""
    if not weight.mesh.cuts_blocks(weight.shape):
        return None
    shape = tuple(weight.parameter.shape)
    shards = math.prod(shape) // math.prod(weight.shape)
    return SplitBlocks(
        weight.fqn, shape, weight.shape, num_tiles(shape), shards * num_tiles(weight.shape)
    )
