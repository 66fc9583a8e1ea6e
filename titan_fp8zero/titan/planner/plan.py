"""The plan of a job: the buckets of every pipeline rank under both strategies, and what follows."""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from titan_fp8zero.job import BadInput, Job, quiet
from titan_fp8zero.layout import STRATEGIES, BucketLayout, Strategy
from titan_fp8zero.ring import RING_BUFFERS
from titan_fp8zero.titan.parallelize import backwards_per_step
from titan_fp8zero.titan.planner.buckets import (
    BucketMesh,
    PlannedBucket,
    SplitBlocks,
    planned_buckets,
    split_blocks,
)
from titan_fp8zero.titan.planner.costs import (
    RankBytes,
    Scheme,
    StepCost,
    amax_cost,
    step_cost,
    strategy_of,
)
from titan_fp8zero.titan.planner.meshes import parallel_dims_of
from titan_fp8zero.titan.planner.model import Model, ModelPart


@dataclass(frozen=True)
class PlannedRank:
    """What all ranks of a pipeline rank have in common."""

    pipeline_rank: int
    stages: list[int]
    buckets: dict[Strategy, list[PlannedBucket]]
    backwards: int
    """Micro-batches of a step."""
    reductions: int
    """Of a step: 1, or one a micro-batch."""

    @property
    def numel(self) -> int:
        """Parameters that each of the ranks computes with."""
        return sum(bucket.layout.real_numel for bucket in self.buckets["block"])

    def bytes(self, strategy: Strategy) -> RankBytes:
        return sum((bucket.bytes for bucket in self.buckets[strategy]), RankBytes())

    def gradient_buffers(self, strategy: Strategy) -> int:
        """Bytes of gradient buffers that the rank holds at most: those of all buckets where
        micro-batches add up in them, else a ring for each size of them."""
        sizes = [(b.stage, b.bytes.gradient) for b in self.buckets[strategy]]
        if self.backwards > self.reductions:
            return sum(size for _, size in sizes)
        counts = Counter(sizes).items()
        return sum(size * min(count, RING_BUFFERS) for (_, size), count in counts)

    def cost(self, scheme: Scheme) -> StepCost:
        return sum(self.cost_by_mesh(scheme).values(), StepCost())

    def cost_by_mesh(self, scheme: Scheme) -> dict[BucketMesh, StepCost]:
        costs: dict[BucketMesh, StepCost] = {}
        fp8_layouts: dict[BucketMesh, list[BucketLayout]] = {}
        for bucket in self.buckets[strategy_of(scheme)]:
            cost = step_cost(
                scheme,
                bucket.layout,
                bucket.precision,
                replicas=bucket.mesh.replicas,
                reductions=self.reductions,
                moment_dtype=bucket.moment_dtype,
            )
            costs[bucket.mesh] = costs.get(bucket.mesh, StepCost()) + cost
            if bucket.layout.is_fp8:
                fp8_layouts.setdefault(bucket.mesh, []).append(bucket.layout)
        if scheme == "megatron":
            for mesh, layouts in fp8_layouts.items():
                costs[mesh] += amax_cost(layouts)
        return costs


class Padding(NamedTuple):
    """Tiles over all ranks of the world."""

    real: int
    padding: int

    @property
    def share(self) -> float:
        """Of padding in the real tiles."""
        return self.padding / self.real if self.real else 0.0


@dataclass(frozen=True)
class Plan:
    """A job, laid out."""

    job: Job
    degrees: dict[str, int]
    """Mesh dims as TorchTitan names them, and their sizes."""
    ranks: list[PlannedRank]
    """By pipeline rank."""
    split_blocks: list[SplitBlocks]

    @property
    def fullest(self) -> PlannedRank:
        """The pipeline rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.bytes("block").held)

    def busiest(self, scheme: Scheme) -> StepCost:
        """What a step costs the pipeline rank that sends most."""
        return max((rank.cost(scheme) for rank in self.ranks), key=lambda cost: cost.sent)

    def padding(self, strategy: Strategy) -> dict[str, Padding]:
        """Of FP8 weights: "all", "dense" and, under expert parallelism, "experts"."""
        buckets = [bucket for rank in self.ranks for bucket in rank.buckets[strategy]]
        fp8 = [bucket for bucket in buckets if bucket.layout.is_fp8]
        experts = [bucket for bucket in fp8 if bucket.mesh.has_experts]
        dense = [bucket for bucket in fp8 if not bucket.mesh.has_experts]
        kinds = {"all": fp8, "dense": dense, "experts": experts}
        return {kind: self._padding_of(chosen) for kind, chosen in kinds.items() if chosen}

    def _padding_of(self, buckets: Iterable[PlannedBucket]) -> Padding:
        per_pipeline_rank = self.job.nproc // len(self.ranks)
        shares = [(b.layout, per_pipeline_rank // b.layout.num_ranks) for b in buckets]
        return Padding(
            sum(layout.real_units * copies for layout, copies in shares),
            sum(layout.padding_units * copies for layout, copies in shares),
        )

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Of every rank of the world in turn: its index in each mesh dim."""
        dims_of = (_DENSE, _SPARSE) if self.degrees["ep"] > 1 else (_DENSE,)
        meshes = [
            (dims, itertools.product(*[range(self.degrees[dim]) for dim in dims]))
            for dims in dims_of
        ]
        for _ in range(self.job.nproc):
            yield {
                dim: index
                for dims, indices in meshes
                for dim, index in zip(dims, next(indices), strict=True)
            }


# From the outermost dim, as `ParallelDims.build_mesh` unflattens the world.
_DENSE = ("pp", "dp_replicate", "fsdp", "tp")
_SPARSE = ("pp", "dp_replicate", "efsdp", "ep", "etp")


def make_plan(job: Job) -> Plan:
    """Lay a job out, in the time it takes to build its model on the meta device.

    Raises BadInput where TorchTitan or `shard_zero1` refuses the config.
    """
    try:
        with quiet(), warnings.catch_warnings():
            # TP plans name modules that a pipeline stage lacks.
            warnings.filterwarnings("ignore", "Parallelize plan key")
            model = Model(job)
            parts = [model.parts_of(rank) for rank in range(_degrees(job)["pp"])]
            backwards = backwards_per_step(job.config, parallel_dims_of(job))
            ranks = [_planned_rank(rank, of_rank, backwards) for rank, of_rank in enumerate(parts)]
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        # TorchTitan's refusals, asserts among them, and ours.
        reason = " ".join(str(error).split())
        raise BadInput(f"{job.config_file} cannot be planned: {reason}") from error
    weights = [weight for of_rank in parts for part in of_rank for weight in part.weights]
    split = [split_blocks(weight) for weight in weights if weight.is_fp8]
    return Plan(job, _degrees(job), ranks, [found for found in split if found is not None])


def _degrees(job: Job) -> dict[str, int]:
    dims = parallel_dims_of(job)
    fsdp = dims.dp_shard * dims.cp
    degrees = {
        "pp": dims.pp,
        "dp_replicate": dims.dp_replicate,
        "fsdp": fsdp,
        "cp": dims.cp,
        "tp": dims.tp,
        "ep": dims.ep,
        "etp": dims.etp,
    }
    if dims.ep_enabled:
        degrees["efsdp"] = fsdp * dims.tp // (dims.etp * dims.ep)
    return degrees


def _planned_rank(pipeline_rank: int, parts: list[ModelPart], backwards: int) -> PlannedRank:
    buckets = {
        strategy: [bucket for part in parts for bucket in planned_buckets(part, strategy)]
        for strategy in STRATEGIES
    }
    reductions = backwards // parts[0].sharding.backwards_per_step
    stages = [part.stage for part in parts]
    return PlannedRank(pipeline_rank, stages, buckets, backwards, reductions)
