"""Prints a plan as tables for the terminal, bounded in length; the JSON has everything."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.table import Table

from titan_fp8zero.layout import STRATEGIES, Strategy
from titan_fp8zero.titan.planner.buckets import BucketMesh, PlannedBucket
from titan_fp8zero.titan.planner.costs import SCHEMES, Bandwidths, RankBytes
from titan_fp8zero.titan.planner.plan import Plan, PlannedRank
from titan_fp8zero.titan.planner.record import rank_rows
from titan_fp8zero.titan.planner.sample import sample, shown

SHOWN_BUCKETS = 16
SHOWN_RANKS = 8
SHOWN_WEIGHTS = 16

_BYTES = ("compute", "buffers", "gradients", "main", "moments", "payload")
"""Of weights to compute with, of gradients before and after reduction, and of the rest."""


def print_plan(
    plan: Plan, strategies: Sequence[Strategy], bandwidths: Bandwidths, console: Console
) -> None:
    """Prints what each rank holds, the padding, and what a step costs beside other schemes."""
    model = plan.job.config.model
    console.print(
        f"{model.name} {model.flavor} on {plan.job.nproc:,} ranks: {_mesh(plan.degrees)}",
        highlight=False,
    )
    for strategy in strategies:
        console.print(_pipeline_ranks(plan, strategy))
        console.print(_buckets(plan.fullest, strategy))
        console.print(_ranks(plan, strategy))
    console.print(_padding(plan))
    console.print(_costs(plan, bandwidths))
    console.print(_collectives(plan.fullest))
    if plan.degrees["tp"] > 1:
        _print_split_blocks(plan, console)


def _mesh(degrees: dict[str, int]) -> str:
    def part(*dims: str) -> str:
        return " x ".join(f"{dim} {degrees[dim]}" for dim in dims if degrees[dim] > 1)

    dense = part("pp", "dp_replicate", "fsdp", "tp") or "no mesh"
    context = f", {part('cp')} within fsdp" if degrees["cp"] > 1 else ""
    experts = f", experts on {part('efsdp', 'ep', 'etp')}" if degrees["ep"] > 1 else ""
    return f"{dense}{context}{experts}"


def _table(title: str, columns: Iterable[str], left: int = 1) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for index, column in enumerate(columns):
        is_left = index < left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=is_left)
    return table


def _pipeline_ranks(plan: Plan, strategy: Strategy) -> Table:
    table = _table(
        f'Bytes on each rank, strategy "{strategy}"',
        ("pipeline rank", "stages", "parameters", "buckets", *_BYTES),
        left=2,
    )
    table.caption = (
        "compute: FP8 codes, scales, high-precision weights. buffers: gradients before they are "
        "reduced, at most. gradients: the rank's share."
    )
    rows = [(rank, _pipeline_rank_cells(rank, strategy)) for rank in plan.ranks]
    for cells, alike in itertools.groupby(rows, key=lambda row: row[1]):
        ranks = [rank for rank, _ in alike]
        stages = [",".join(map(str, rank.stages)) for rank in ranks]
        names = [str(rank.pipeline_rank) for rank in ranks]
        table.add_row(_first_to_last(names), _first_to_last(stages), *cells)
    return table


def _first_to_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _pipeline_rank_cells(rank: PlannedRank, strategy: Strategy) -> tuple[str, ...]:
    buckets = rank.buckets[strategy]
    sizes = _byte_cells(rank.bytes(strategy), rank.gradient_buffers(strategy))
    return (f"{rank.numel:,}", str(len(buckets)), *sizes)


def _byte_cells(sizes: RankBytes, gradient_buffers: int) -> tuple[str, ...]:
    columns = (
        sizes.compute,
        gradient_buffers,
        sizes.reduced_gradient,
        sizes.main,
        sizes.moments,
        sizes.payload,
    )
    return tuple(_size(size) for size in columns)


def _size(size: float) -> str:
    unit, suffix = pick_unit_and_suffix(int(size), ["B", "kB", "MB", "GB", "TB", "PB"], 1000)
    digits = 0 if size >= 100 * unit or suffix == "B" else 1
    return f"{size / unit:,.{digits}f} {suffix}"


def _buckets(rank: PlannedRank, strategy: Strategy) -> Table:
    alike = list(Counter(_bucket_cells(bucket) for bucket in rank.buckets[strategy]).items())
    chosen = sample(len(alike), SHOWN_BUCKETS)
    table = _table(
        f'Buckets of a rank of pipeline rank {rank.pipeline_rank}, strategy "{strategy}": '
        f"{shown(len(chosen), len(alike), 'kinds')}",
        ("mesh", "a rank has", "buckets", "weights", "padding", *_BYTES),
        left=2,
    )
    for index in chosen:
        (mesh, units, *cells), count = alike[index]
        table.add_row(mesh, units, str(count), *cells)
    return table


def _bucket_cells(bucket: PlannedBucket) -> tuple[str, ...]:
    layout = bucket.layout
    kind = "tiles" if layout.is_fp8 else "elements"
    return (
        str(bucket.mesh),
        f"{layout.units_per_rank:,} {kind}",
        str(len(layout.members)),
        f"{layout.padding_units / layout.real_units:.2%}",
        *_byte_cells(bucket.bytes, bucket.bytes.gradient),
    )


def _ranks(plan: Plan, strategy: Strategy) -> Table:
    rows = list(rank_rows(plan, [strategy]))
    chosen = sample(len(rows), SHOWN_RANKS)
    dims = [dim for dim in rows[0] if dim in plan.degrees and plan.degrees[dim] > 1]
    owned: list[str] = list(rows[0][strategy])
    table = _table(
        f'What ranks own, strategy "{strategy}": {shown(len(chosen), len(rows), "ranks")}',
        ("rank", *dims, *[name.replace("_", " ") for name in owned]),
    )
    for index in chosen:
        row: dict[str, Any] = rows[index]
        cells = [row["rank"], *[row[dim] for dim in dims], *[row[strategy][key] for key in owned]]
        table.add_row(*[f"{cell:,}" for cell in cells])
    return table


def _padding(plan: Plan) -> Table:
    table = _table("Padding of FP8 weights, all ranks together", ("weights", "tiles", *_STRATEGY))
    table.caption = 'Strategy "param" pads in every bucket: a larger bucket_mib lets it pad less.'
    by_strategy = {strategy: plan.padding(strategy) for strategy in STRATEGIES}
    for kind, padding in by_strategy["block"].items():
        shares = [f"{of[kind].padding:,} ({of[kind].share:.3%})" for of in by_strategy.values()]
        table.add_row(kind, f"{padding.real:,}", *shares)
    return table


_STRATEGY = tuple(f'padding, "{strategy}"' for strategy in STRATEGIES)


def _costs(plan: Plan, bandwidths: Bandwidths) -> Table:
    table = _table(
        "A step of the busiest rank: bytes sent, collectives, estimated times",
        ("scheme", "reduce", "amax", "gather", "collectives", "network", "update", "together"),
    )
    table.caption = (
        f"Times are estimates from {bandwidths.network:g} GB/s that a rank sends and "
        f"{bandwidths.memory:g} GB/s of its memory: without latency or overlap."
    )
    for scheme, title in SCHEMES.items():
        cost = plan.busiest(scheme)
        table.add_row(
            title,
            *[_size(size) for size in (cost.reduce, cost.amax, cost.gather)],
            str(cost.collectives),
            f"{bandwidths.communication_ms(cost):,.2f} ms",
            f"{bandwidths.update_ms(cost):,.2f} ms",
            f"{bandwidths.step_ms(cost):,.2f} ms",
        )
    return table


def _collectives(rank: PlannedRank) -> Table:
    table = _table(
        f'Collectives a step of pipeline rank {rank.pipeline_rank}, strategy "block"',
        ("mesh", "weights", "buckets", "reduce-scatter", "all-reduce", "all-gather"),
    )
    buckets: dict[BucketMesh, list[PlannedBucket]] = {}
    for bucket in rank.buckets["block"]:
        buckets.setdefault(bucket.mesh, []).append(bucket)
    for mesh, cost in rank.cost_by_mesh("block").items():
        weights = sum(len(bucket.layout.members) for bucket in buckets[mesh])
        counts = (weights, len(buckets[mesh]), *cost.collectives_by_kind)
        table.add_row(str(mesh), *[f"{count:,}" for count in counts])
    return table


def _print_split_blocks(plan: Plan, console: Console) -> None:
    if not plan.split_blocks:
        console.print("TP: every weight keeps the blocks of the unsharded weight.")
        return
    alike = Counter(
        split._replace(fqn=re.sub(r"\.\d+\.", ".*.", split.fqn)) for split in plan.split_blocks
    )
    chosen = list(alike.items())[:SHOWN_WEIGHTS]
    table = _table(
        "TP: blocks differ from the unsharded weight's, where a local size is no multiple of 128: "
        f"{shown(len(chosen), len(alike), 'kinds of weights')}",
        ("weight", "count", "shape", "local shape", "tiles", "tiles of all TP ranks"),
    )
    for split, count in chosen:
        shapes = (str(list(shape)) for shape in (split.shape, split.local_shape))
        tiles = (f"{number:,}" for number in (split.tiles, split.tiles_of_all_ranks))
        table.add_row(split.fqn, str(count), *shapes, *tiles)
    console.print(table)
