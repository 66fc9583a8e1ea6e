"""Draws who owns which units of a bucket: a row a rank, a colour a parameter, padding hatched."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_fp8zero.layout import BucketLayout, Strategy
from titan_fp8zero.titan.planner.buckets import BucketMesh, PlannedBucket
from titan_fp8zero.titan.planner.plan import Plan, PlannedRank
from titan_fp8zero.titan.planner.sample import sample, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN_RANKS = 64
DRAWN_BUCKETS = 4
LEGEND_ENTRIES = 16
TILE_EDGES = 48
"""Up to so many tiles a rank, each one is outlined."""


def draw_plan(plan: Plan, strategies: Sequence[Strategy], image: Path) -> None:
    """Draws a plan into an image file."""
    image.parent.mkdir(parents=True, exist_ok=True)
    figure_of(plan, strategies).savefig(image, dpi=110)


def figure_of(plan: Plan, strategies: Sequence[Strategy]) -> "Figure":
    """A row of panels for each mesh and kind of bucket, of the fullest pipeline rank: the bucket
    that pads most, under each of the strategies."""
    from matplotlib.figure import Figure  # not pyplot: it needs no display and leaves no state

    rank = plan.fullest
    drawn = _most_padded(rank)
    heights = [_height(rank.buckets["block"][index].layout) for index in drawn]
    figure = Figure(figsize=(4 + 7 * len(strategies), 0.6 + sum(heights)), layout="constrained")
    grid = figure.subplots(
        len(drawn), len(strategies), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for row, index in zip(grid, drawn, strict=True):
        for axes, strategy in zip(row, strategies, strict=True):
            _draw_bucket(axes, rank.buckets[strategy][index], strategy)
        _add_legend(row[-1], rank.buckets[strategies[0]][index].layout)
    config = plan.job.config.model
    count = shown(len(drawn), len(rank.buckets["block"]), "buckets")
    figure.suptitle(
        f"{config.name} {config.flavor} on {plan.job.nproc:,} ranks, pipeline rank "
        f"{rank.pipeline_rank}: {count}"
    )
    return figure


def _height(layout: BucketLayout) -> float:
    """Inches of a panel, for its ranks and for its legend."""
    legend_lines = min(len(layout.members), LEGEND_ENTRIES) + 2
    return 1 + max(0.12 * min(layout.num_ranks, DRAWN_RANKS), 0.17 * legend_lines)


def _most_padded(rank: PlannedRank) -> list[int]:
    """Indices of buckets; the same bucket has the same index under both strategies."""
    best: dict[tuple[BucketMesh, bool], int] = {}
    buckets = rank.buckets["block"]
    for index, bucket in enumerate(buckets):
        key = (bucket.mesh, bucket.layout.is_fp8)
        if key not in best or _share(bucket) > _share(buckets[best[key]]):
            best[key] = index
    return list(best.values())[:DRAWN_BUCKETS]


def _share(bucket: PlannedBucket) -> float:
    return bucket.layout.padding_units / bucket.layout.real_units


def _draw_bucket(axes: Any, bucket: PlannedBucket, strategy: Strategy) -> None:
    layout = bucket.layout
    ranks = sample(layout.num_ranks, DRAWN_RANKS)
    kind = "tiles" if layout.is_fp8 else "elements"
    segments: dict[int, list[tuple[int, int, Any]]] = {rank: [] for rank in ranks}
    for rank, start, units, color in _coloured_runs(layout):
        if rank in segments:
            segments[rank].append((start, units, color))
    for y, owned in enumerate(segments.values()):
        axes.broken_barh(
            [(0, layout.units_per_rank)],
            (y - 0.4, 0.8),
            facecolor="white",
            edgecolor="grey",
            hatch="//////",
            linewidth=0.3,
        )
        axes.broken_barh(
            [(start, units) for start, units, _ in owned],
            (y - 0.4, 0.8),
            facecolors=[color for _, _, color in owned],
        )
    if layout.is_fp8 and layout.units_per_rank <= TILE_EDGES:
        axes.vlines(range(layout.units_per_rank + 1), -0.4, len(ranks) - 0.6, "white", lw=0.6)
    axes.set_xlim(0, layout.units_per_rank)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    ticks = sample(len(ranks), 16)
    axes.set_yticks(ticks, [str(ranks[tick]) for tick in ticks])
    axes.set_ylabel(f"{bucket.mesh.shard_dim} rank")
    axes.set_xlabel(f"{kind} of the rank's shard")
    axes.set_title(
        f'strategy "{strategy}", mesh {bucket.mesh}: '
        f"{shown(len(ranks), layout.num_ranks, 'ranks')}\n"
        f"{layout.real_units:,} {kind}, {layout.padding_units:,} padding "
        f"({_share(bucket):.2%})",
        fontsize=9,
    )


def _coloured_runs(layout: BucketLayout) -> Iterator[tuple[int, int, int, Any]]:
    """Rank, first unit in its shard, units and colour of every run."""
    colors = _colors(layout)
    for main in layout.mains:
        for member in main.members:
            for run in main.runs(member):
                yield run.rank, run.local_start, run.units, colors[member.weight.fqn]


def _colors(layout: BucketLayout) -> dict[str, Any]:
    from matplotlib import colormaps

    largest_first = sorted((m.weight for m in layout.members), key=lambda w: (-w.units, w.fqn))
    palette = colormaps["tab20"].colors  # type: ignore[attr-defined]
    return {w.fqn: palette[index % len(palette)] for index, w in enumerate(largest_first)}


def _add_legend(axes: Any, layout: BucketLayout) -> None:
    from matplotlib.patches import Patch

    colors = list(_colors(layout).items())
    handles = [Patch(color=color, label=name) for name, color in colors[:LEGEND_ENTRIES]]
    handles.append(Patch(facecolor="white", edgecolor="grey", hatch="//////", label="padding"))
    if len(colors) > LEGEND_ENTRIES:
        left = len(colors) - LEGEND_ENTRIES
        handles.append(Patch(alpha=0, label=f"and {left} more parameters"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
