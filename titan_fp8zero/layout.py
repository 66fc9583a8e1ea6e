"""Which weight goes to which bucket, and which of its units to which rank.

Pure Python: no tensors, no process group. A unit is a tile of an FP8 weight, or an element of a
high-precision parameter. A main parameter is a row of units, split evenly over the ranks, that
holds one or several weights end to end; a bucket is rank-major: a rank's shard of it is the
concatenation of its main parameters' local units.
"""

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Strategy = Literal["block", "param"]
STRATEGIES: tuple[Strategy, ...] = ("block", "param")

ELEMENT_ALIGNMENT = 16
"""A rank owns a multiple of so many elements of a high-precision main parameter: 64 bytes, a SIMD
register. Vectorized updates then have no remainder, which they would round otherwise."""


@dataclass(frozen=True)
class WeightSpec:
    """A weight as the layout sees it."""

    fqn: str
    units: int
    """Tiles (FP8) or elements (high-precision)."""
    numel: int
    """Real elements, edge padding of blocks not counted."""
    unit_bytes: int
    """Bytes of one unit of gradient on the wire."""
    num_ranks: int
    """Ranks that share the weight out."""
    is_fp8: bool
    group: Hashable
    """Weights share a bucket only within a group: same mesh, kind, and trainability."""


@dataclass(frozen=True)
class Member:
    """A weight inside a main parameter: units `[start, start + weight.units)` of it."""

    weight: WeightSpec
    start: int


class Run(NamedTuple):
    """Consecutive units of one weight, or of padding, that one rank owns."""

    rank: int
    local_start: int
    """First unit, in the rank's shard of the bucket."""
    start: int
    """First unit, in the weight or the padding."""
    units: int


@dataclass(frozen=True)
class MainLayout:
    """A main parameter: `num_ranks * units_per_rank` units, padding included."""

    members: tuple[Member, ...]
    num_ranks: int
    units_per_rank: int
    local_start: int
    """First unit, in every rank's shard of the bucket."""

    @property
    def units(self) -> int:
        return self.num_ranks * self.units_per_rank

    @property
    def local(self) -> slice:
        """Where it lies in every rank's shard of the bucket."""
        return slice(self.local_start, self.local_start + self.units_per_rank)

    def runs(self, member: Member) -> Iterator[Run]:
        """The runs of a member, by rank."""
        return self._runs(member.start, member.start + member.weight.units)

    def padding_runs(self) -> Iterator[Run]:
        """The runs of what belongs to no member."""
        end = 0
        for member in self.members:  # in the order of their units
            yield from self._runs(end, member.start)
            end = member.start + member.weight.units
        yield from self._runs(end, self.units)

    def _runs(self, start: int, end: int) -> Iterator[Run]:
        unit = start
        while unit < end:
            rank, within_rank = divmod(unit, self.units_per_rank)
            units = min(self.units_per_rank - within_rank, end - unit)
            yield Run(rank, self.local_start + within_rank, unit - start, units)
            unit += units


@dataclass(frozen=True)
class BucketLayout:
    """Main parameters that one collective serves."""

    is_fp8: bool
    num_ranks: int
    mains: tuple[MainLayout, ...]

    @property
    def units_per_rank(self) -> int:
        return sum(main.units_per_rank for main in self.mains)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for main in self.mains for member in main.members)

    @property
    def real_units(self) -> int:
        return sum(member.weight.units for member in self.members)

    @property
    def real_numel(self) -> int:
        return sum(member.weight.numel for member in self.members)

    @property
    def padding_units(self) -> int:
        return self.num_ranks * self.units_per_rank - self.real_units


def plan_buckets(
    weights: Sequence[WeightSpec],
    *,
    strategy: Strategy = "block",
    bucket_bytes: int = 512 << 20,
    padding_limit: float = 0.02,
) -> list[BucketLayout]:
    """Group weights, in the order given (that of forward), into buckets of at most `bucket_bytes`.

    Buckets are in the order of their first weights: of forward's need for them, and in reverse of
    backward's last gradients.

    strategy "block" shares out the tiles of every weight; small weights are pooled into one main
    parameter where padding would pass `padding_limit` of a bucket. "param" gives whole weights to
    ranks, greedy, largest first (FP8-LM, arXiv:2310.18313), and pads every rank to the fullest.
    Raises ValueError for an unknown strategy, or a limit out of range.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    if not padding_limit >= 0:
        raise ValueError(f"padding_limit is a share of a bucket, at least 0, got {padding_limit}")
    position = {weight.fqn: index for index, weight in enumerate(weights)}
    buckets = sorted(
        _split_into_buckets(weights, bucket_bytes), key=lambda bucket: position[bucket[0].fqn]
    )
    if strategy == "param":
        return [_bin_whole_weights(bucket) for bucket in buckets]
    return [_share_out_tiles(bucket, padding_limit) for bucket in buckets]


def _split_into_buckets(
    weights: Sequence[WeightSpec], bucket_bytes: int
) -> Iterator[list[WeightSpec]]:
    groups: dict[Hashable, list[WeightSpec]] = {}
    for weight in weights:
        groups.setdefault(weight.group, []).append(weight)
    for group in groups.values():
        bucket: list[WeightSpec] = []
        filled = 0
        for weight in group:
            size = weight.units * weight.unit_bytes
            if bucket and filled + size > bucket_bytes:
                yield bucket
                bucket, filled = [], 0
            bucket.append(weight)
            filled += size
        yield bucket


def _units_per_rank(units: int, num_ranks: int, is_fp8: bool) -> int:
    alignment = 1 if is_fp8 else ELEMENT_ALIGNMENT
    return -(-units // (num_ranks * alignment)) * alignment


def _padding(units: int, num_ranks: int, is_fp8: bool) -> int:
    return num_ranks * _units_per_rank(units, num_ranks, is_fp8) - units


def _share_out_tiles(weights: list[WeightSpec], padding_limit: float) -> BucketLayout:
    num_ranks, is_fp8 = weights[0].num_ranks, weights[0].is_fp8
    pooled = _choose_pooled(weights, padding_limit)
    alone = [[weight] for weight in weights if weight.fqn not in pooled]
    pool = [weight for weight in weights if weight.fqn in pooled]
    mains, local_start = [], 0
    for group in [*alone, pool] if pool else alone:
        members, start = [], 0
        for weight in group:
            members.append(Member(weight, start))
            start += weight.units
        units_per_rank = _units_per_rank(start, num_ranks, is_fp8)
        mains.append(MainLayout(tuple(members), num_ranks, units_per_rank, local_start))
        local_start += units_per_rank
    return BucketLayout(weights[0].is_fp8, num_ranks, tuple(mains))


def _choose_pooled(weights: list[WeightSpec], padding_limit: float) -> set[str]:
    """Pool the smallest weights, as few as bring the bucket's padding under the limit."""
    num_ranks, is_fp8 = weights[0].num_ranks, weights[0].is_fp8
    allowed = padding_limit * sum(weight.units for weight in weights)
    padding = sum(_padding(weight.units, num_ranks, is_fp8) for weight in weights)
    if padding <= allowed:
        return set()
    pooled: set[str] = set()
    pooled_units = 0
    for weight in sorted(weights, key=lambda weight: weight.units):
        padding -= _padding(weight.units, num_ranks, is_fp8)
        pooled_units += weight.units
        pooled.add(weight.fqn)
        if len(pooled) > 1 and padding + _padding(pooled_units, num_ranks, is_fp8) <= allowed:
            break
    return pooled


def _bin_whole_weights(weights: list[WeightSpec]) -> BucketLayout:
    num_ranks, is_fp8 = weights[0].num_ranks, weights[0].is_fp8
    bins: list[list[WeightSpec]] = [[] for _ in range(num_ranks)]
    emptiest = [(0, rank) for rank in range(num_ranks)]
    for weight in sorted(weights, key=lambda weight: -weight.units):
        filled, rank = heapq.heappop(emptiest)
        bins[rank].append(weight)
        heapq.heappush(emptiest, (filled + weight.units, rank))
    fullest = max(filled for filled, _ in emptiest)
    units_per_rank = _units_per_rank(fullest * num_ranks, num_ranks, is_fp8)
    members = []
    for rank, owned in enumerate(bins):
        start = rank * units_per_rank
        for weight in owned:
            members.append(Member(weight, start))
            start += weight.units
    main = MainLayout(tuple(members), num_ranks, units_per_rank, 0)
    return BucketLayout(weights[0].is_fp8, num_ranks, (main,))
