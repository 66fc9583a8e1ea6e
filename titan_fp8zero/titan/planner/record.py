"""A plan for programs: plain data, written as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_fp8zero.layout import STRATEGIES, Strategy
from titan_fp8zero.titan.planner.buckets import PlannedBucket
from titan_fp8zero.titan.planner.costs import SCHEMES, Bandwidths, StepCost
from titan_fp8zero.titan.planner.plan import Plan, PlannedRank


def write_json(
    plan: Plan, strategies: Sequence[Strategy], bandwidths: Bandwidths, file: Path
) -> None:
    """Writes the whole plan: every pipeline rank, bucket and rank."""
    file.parent.mkdir(parents=True, exist_ok=True)
    record = plan_as_dict(plan, strategies, bandwidths)
    file.write_text(json.dumps(record, allow_nan=False) + "\n")


def plan_as_dict(
    plan: Plan, strategies: Sequence[Strategy], bandwidths: Bandwidths
) -> dict[str, Any]:
    """Sizes are in bytes, of one rank unless said otherwise; times in ms."""
    config = plan.job.config
    return {
        "config": str(plan.job.config_file),
        "model": config.model.name,
        "flavor": config.model.flavor,
        "world_size": plan.job.nproc,
        "mesh": plan.degrees,
        "estimated_from": {
            "network_gb_per_s": bandwidths.network,
            "memory_gb_per_s": bandwidths.memory,
        },
        "padding": {
            strategy: {
                kind: {"tiles": padding.real, "padding": padding.padding, "share": padding.share}
                for kind, padding in plan.padding(strategy).items()
            }
            for strategy in STRATEGIES
        },
        "costs": {scheme: _cost(plan.busiest(scheme), bandwidths) for scheme in SCHEMES},
        "blocks_changed_by_tp": [split._asdict() for split in plan.split_blocks],
        "pipeline_ranks": [_pipeline_rank(rank, strategies, bandwidths) for rank in plan.ranks],
        "ranks": list(rank_rows(plan, strategies)),
    }


def _pipeline_rank(
    rank: PlannedRank, strategies: Sequence[Strategy], bandwidths: Bandwidths
) -> dict[str, Any]:
    return {
        "pipeline_rank": rank.pipeline_rank,
        "stages": rank.stages,
        "parameters": rank.numel,
        "bytes": {
            strategy: {
                **asdict(rank.bytes(strategy)),
                "gradient_buffers_at_most": rank.gradient_buffers(strategy),
            }
            for strategy in strategies
        },
        "costs": {
            scheme: {
                str(mesh): _cost(cost, bandwidths)
                for mesh, cost in rank.cost_by_mesh(scheme).items()
            }
            for scheme in SCHEMES
        },
        "buckets": {
            strategy: [_bucket(bucket) for bucket in rank.buckets[strategy]]
            for strategy in strategies
        },
    }


def _cost(cost: StepCost, bandwidths: Bandwidths) -> dict[str, Any]:
    return {
        **asdict(cost),
        "collectives": cost.collectives,
        "estimated_communication_ms": bandwidths.communication_ms(cost),
        "estimated_update_ms": bandwidths.update_ms(cost),
    }


def _bucket(bucket: PlannedBucket) -> dict[str, Any]:
    layout = bucket.layout
    return {
        "stage": bucket.stage,
        "mesh": bucket.mesh._asdict(),
        "unit": "tile" if layout.is_fp8 else "element",
        "units_per_rank": layout.units_per_rank,
        "real_units": layout.real_units,
        "padding_units": layout.padding_units,
        "owned_units": bucket.owned_units,
        "bytes": asdict(bucket.bytes),
        "main_parameters": [[m.weight.fqn for m in main.members] for main in layout.mains],
    }


def rank_rows(plan: Plan, strategies: Sequence[Strategy]) -> Iterator[dict[str, Any]]:
    """For every rank of the world its mesh coordinates, and what it owns under each strategy."""
    for rank, coordinates in enumerate(plan.coordinates()):
        buckets = plan.ranks[coordinates["pp"]].buckets
        owned: dict[str, Any] = {
            strategy: _owned(buckets[strategy], coordinates) for strategy in strategies
        }
        yield {"rank": rank, **coordinates, **owned}


def _owned(buckets: Sequence[PlannedBucket], coordinates: dict[str, int]) -> dict[str, int]:
    owned = dict.fromkeys(("tiles", "padding_tiles", "elements", "padding_elements"), 0)
    for bucket in buckets:
        unit = "tiles" if bucket.layout.is_fp8 else "elements"
        dim = bucket.mesh.shard_dim
        real = bucket.owned_units[0 if dim is None else coordinates[dim]]
        owned[unit] += real
        owned[f"padding_{unit}"] += bucket.layout.units_per_rank - real
    return owned
