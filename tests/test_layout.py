"""The layout's promises, on random models: who owns what, padding, pooling, bins and buckets."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_fp8zero.layout import (
    ELEMENT_ALIGNMENT,
    BucketLayout,
    MainLayout,
    WeightSpec,
    plan_buckets,
)

UNIT_BYTES = 4
fast = settings(max_examples=150, deadline=None)


def spec(
    fqn: str, units: int, num_ranks: int, group: str = "dense", numel: int | None = None
) -> WeightSpec:
    real = units * 100 - 7 if numel is None else numel
    return WeightSpec(fqn, units, real, UNIT_BYTES, num_ranks, group != "flat", group)


@st.composite
def models(draw: st.DrawFn) -> list[WeightSpec]:
    """Weights of up to three groups, each group on a mesh of its own size, in mixed order."""
    ranks = {group: draw(st.integers(1, 9)) for group in ("dense", "expert", "flat")}
    weights = draw(
        st.lists(st.tuples(st.integers(1, 60), st.sampled_from(sorted(ranks))), min_size=1)
    )
    return [
        spec(f"layers.{index}", units, ranks[group], group)
        for index, (units, group) in enumerate(weights)
    ]


options = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(["block", "param"]),
        "bucket_bytes": st.integers(1, 200 * UNIT_BYTES),
        "padding_limit": st.floats(0, 2) | st.just(float("inf")),
    }
)


def alignment(bucket: BucketLayout) -> int:
    return 1 if bucket.is_fp8 else ELEMENT_ALIGNMENT


def padding(main: MainLayout) -> int:
    return main.units - sum(member.weight.units for member in main.members)


def pooled(bucket: BucketLayout) -> list[WeightSpec]:
    return [m.weight for main in bucket.mains if len(main.members) > 1 for m in main.members]


@fast
@given(models(), options)
def test_buckets_are_in_the_order_of_their_first_weights(weights, options):
    position = {weight.fqn: index for index, weight in enumerate(weights)}
    firsts = [
        min(position[member.weight.fqn] for member in bucket.members)
        for bucket in plan_buckets(weights, **options)
    ]
    assert firsts == sorted(firsts)


@fast
@given(models(), options)
def test_every_unit_is_owned_exactly_once(weights, options):
    buckets = plan_buckets(weights, **options)
    seen = [member.weight for bucket in buckets for member in bucket.members]
    assert sorted(w.fqn for w in seen) == sorted(w.fqn for w in weights)
    for bucket in buckets:
        slots: set[tuple[int, int]] = set()
        for main in bucket.mains:
            for member in main.members:
                runs = list(main.runs(member))
                assert [run.start for run in runs] == [
                    sum(before.units for before in runs[:index]) for index in range(len(runs))
                ]
                assert sum(run.units for run in runs) == member.weight.units
                assert all(before.rank < after.rank for before, after in pairwise(runs))
                for run in runs:
                    assert run.units > 0
                    assert 0 <= run.rank < bucket.num_ranks
                    end = main.local_start + main.units_per_rank
                    assert main.local_start <= run.local_start
                    assert run.local_start + run.units <= end
                    # Units lie in the main parameter in order, rank after rank.
                    in_main = run.rank * main.units_per_rank + run.local_start - main.local_start
                    assert in_main == member.start + run.start
                    mine = {(run.rank, run.local_start + unit) for unit in range(run.units)}
                    assert not mine & slots
                    slots |= mine
        assert all(local < bucket.units_per_rank for _, local in slots)
        assert len(slots) == bucket.real_units
        padding = [run for main in bucket.mains for run in main.padding_runs()]
        slots |= {
            (run.rank, run.local_start + unit) for run in padding for unit in range(run.units)
        }
        assert sum(run.units for run in padding) == bucket.padding_units
        assert len(slots) == bucket.num_ranks * bucket.units_per_rank


@fast
@given(models(), options)
def test_main_parameters_lie_end_to_end_in_a_bucket(weights, options):
    for bucket in plan_buckets(weights, **options):
        end = 0
        for main in bucket.mains:
            assert main.local_start == end
            assert main.num_ranks == bucket.num_ranks
            end += main.units_per_rank
        assert end == bucket.units_per_rank


@fast
@given(models(), options)
def test_counts_are_real(weights, options):
    for bucket in plan_buckets(weights, **options):
        members = [member.weight for member in bucket.members]
        assert bucket.real_units == sum(w.units for w in members)
        assert bucket.real_numel == sum(w.numel for w in members)
        assert bucket.padding_units == sum(map(padding, bucket.mains))
        assert bucket.num_ranks == members[0].num_ranks
        assert bucket.is_fp8 == members[0].is_fp8


@fast
@given(models(), options)
def test_block_pads_less_than_an_aligned_unit_a_rank(weights, options):
    for bucket in plan_buckets(weights, **{**options, "strategy": "block"}):
        for main in bucket.mains:
            assert 0 <= padding(main) < bucket.num_ranks * alignment(bucket)
            assert main.units_per_rank % alignment(bucket) == 0


@fast
@given(models(), options)
def test_pooling_brings_padding_under_the_limit(weights, options):
    limit = options["padding_limit"]
    for bucket in plan_buckets(weights, **{**options, "strategy": "block"}):
        allowed = limit * bucket.real_units
        quantum = bucket.num_ranks * alignment(bucket)
        least = -bucket.real_units % quantum  # all in one main parameter
        if least <= allowed:
            assert bucket.padding_units <= allowed
        else:
            assert bucket.padding_units == least
        members = [member.weight for member in bucket.members]
        unpooled = sum(-w.units % quantum for w in members)
        if unpooled <= allowed:
            assert not pooled(bucket)
        assert sum(len(main.members) > 1 for main in bucket.mains) <= 1
        if pooled(bucket):
            alone = [w.units for w in members if w not in pooled(bucket)]
            assert max(w.units for w in pooled(bucket)) <= min(alone, default=10**9)


def test_pooling_takes_as_few_as_needed():
    weights = [spec(f"w{i}", units, 8) for i, units in enumerate([800, 1, 3, 4, 1600])]
    (bucket,) = plan_buckets(weights, padding_limit=0.001)
    assert {w.fqn for w in pooled(bucket)} == {"w1", "w2", "w3"}
    assert bucket.padding_units == 0
    (bucket,) = plan_buckets(weights, padding_limit=0.005)
    assert {w.fqn for w in pooled(bucket)} == {"w1", "w2"}
    (bucket,) = plan_buckets(weights, padding_limit=float("inf"))
    assert not pooled(bucket)


@fast
@given(models(), options)
def test_param_gives_whole_weights_largest_first(weights, options):
    for bucket in plan_buckets(weights, **{**options, "strategy": "param"}):
        (main,) = bucket.mains
        loads = [0] * bucket.num_ranks
        for member in main.members:
            (run,) = main.runs(member)
            loads[run.rank] += member.weight.units
        greedy = [0] * bucket.num_ranks
        for units in sorted((m.weight.units for m in main.members), reverse=True):
            greedy[greedy.index(min(greedy))] += units
        assert sorted(loads) == sorted(greedy)
        fullest = -(-max(loads) // alignment(bucket)) * alignment(bucket)
        assert main.units_per_rank == fullest
        assert bucket.padding_units == sum(fullest - load for load in loads)


@fast
@given(models(), options)
def test_buckets_are_full_in_order_and_of_one_group(weights, options):
    limit = options["bucket_bytes"]
    buckets = plan_buckets(weights, **options)
    position = {weight.fqn: index for index, weight in enumerate(weights)}
    by_group: dict[str, list[list[WeightSpec]]] = {}
    for bucket in buckets:
        members = sorted((m.weight for m in bucket.members), key=lambda w: position[w.fqn])
        assert len({w.group for w in members}) == 1
        assert len(members) == 1 or sum(w.units * w.unit_bytes for w in members) <= limit
        by_group.setdefault(members[0].group, []).append(members)
        if options["strategy"] == "block":
            alone = [main.members[0].weight.fqn for main in bucket.mains if len(main.members) == 1]
            assert alone == sorted(alone, key=position.__getitem__)
    for group, of_group in by_group.items():
        flat = [weight for members in of_group for weight in members]
        assert flat == [weight for weight in weights if weight.group == group]
        for before, after in pairwise(of_group):
            filled = sum(w.units * w.unit_bytes for w in before)
            assert filled + after[0].units * after[0].unit_bytes > limit


def test_plan_does_not_depend_on_ranks_order_of_calls():
    weights = [spec(f"w{i}", 1 + i * 7 % 11, 4) for i in range(20)]
    for strategy in ("block", "param"):
        plans = [plan_buckets(weights, strategy=strategy, bucket_bytes=100) for _ in range(2)]
        assert plans[0] == plans[1]


def test_a_rank_may_own_only_padding():
    (bucket,) = plan_buckets([spec("one", 1, 4)])
    (main,) = bucket.mains
    assert (main.units_per_rank, bucket.padding_units) == (1, 3)
    assert [run.rank for run in main.runs(main.members[0])] == [0]


def test_no_weights_no_buckets():
    assert plan_buckets([]) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"strategy": "tile"}, "strategy.*tile"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"bucket_bytes": -1}, "bucket_bytes"),
        ({"padding_limit": -0.1}, "padding_limit"),
        ({"padding_limit": float("nan")}, "padding_limit"),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        plan_buckets([spec("w", 3, 2)], **bad)
