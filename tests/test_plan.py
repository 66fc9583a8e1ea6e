"""The planner: what it lays out, counts, estimates, prints and draws; no process group anywhere.

That a plan is what `shard_zero1` makes on real ranks, is a test in test_training.py.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from titan_fp8zero import cli
from titan_fp8zero.bucket import Bucket, DataParallelMesh, Precision
from titan_fp8zero.job import BadInput, load_planned_job
from titan_fp8zero.layout import BucketLayout, WeightSpec, plan_buckets
from titan_fp8zero.ring import RING_BUFFERS, GradientRing
from titan_fp8zero.titan.planner.costs import (
    SCHEMES,
    Bandwidths,
    StepCost,
    amax_cost,
    rank_bytes,
    step_cost,
)
from titan_fp8zero.titan.planner.drawing import DRAWN_RANKS, figure_of
from titan_fp8zero.titan.planner.meshes import GrouplessMesh
from titan_fp8zero.titan.planner.plan import Plan, make_plan
from titan_fp8zero.titan.planner.sample import sample

CONFIGS = Path(__file__).parents[1] / "train_configs"
TILE = 128 * 128
PRECISION = Precision(torch.bfloat16, torch.float32, torch.float32, "fp32", False)


@cache
def planned(config: str, world_size: int | None, *overrides: str) -> Plan:
    return make_plan(load_planned_job(CONFIGS / f"{config}.toml", list(overrides), world_size))


def degrees(**values: int) -> list[str]:
    names = {
        "replicate": "data_parallel_replicate",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
        "etp": "expert_tensor_parallel",
    }
    return [
        word
        for key, value in values.items()
        for word in (f"--parallelism.{names[key]}_degree", str(value))
    ]


# The promise at scale: DeepSeek-V3 671B.


@pytest.mark.parametrize(
    ("config", "world_size", "all_limit", "dense_limit"),
    [
        ("deepseek_v3_671b_pp8_ep32_dp2", 512, 0.0002, 0.005),
        ("deepseek_v3_671b_pp8_ep32_dp8", 2048, 0.002, 0.02),
    ],
)
def test_padding_of_671b_stays_small(
    config: str, world_size: int, all_limit: float, dense_limit: float
) -> None:
    plan = planned(config, None)
    assert plan.job.nproc == world_size
    padding = plan.padding("block")
    assert padding["all"].share <= all_limit
    assert padding["dense"].share <= dense_limit
    assert padding["experts"].padding == 0
    # 58 layers of 256 experts of three 2048 x 7168 weights, whatever the mesh
    assert padding["experts"].real == 58 * 256 * 3 * 16 * 56
    assert plan.padding("param")["all"].share > 1
    assert plan.padding("param")["all"].real == padding["all"].real


def test_671b_has_all_its_parameters_on_8_pipeline_ranks() -> None:
    plan = planned("deepseek_v3_671b_pp8_ep32_dp2", None)
    numel = {False: 0, True: 0}
    fqns: list[str] = []
    for rank in plan.ranks:
        for bucket in rank.buckets["block"]:
            copies = 32 if bucket.mesh.has_experts else 1
            numel[bucket.mesh.has_experts] += copies * bucket.layout.real_numel
            fqns += [member.weight.fqn for member in bucket.layout.members]
    assert numel[False] + numel[True] == 671_026_404_352
    assert len(fqns) == len(set(fqns))
    layers = [
        len({fqn.split(".")[1] for bucket in rank.buckets["block"] for fqn in fqns_of(bucket)})
        for rank in plan.ranks
    ]
    # 63 effective layers; the first stage has the embedding in the place of one, the last the head.
    assert layers == [7, 8, 8, 8, 8, 8, 8, 6]


def fqns_of(bucket: object) -> list[str]:
    members = bucket.layout.members  # type: ignore[attr-defined]
    return [m.weight.fqn for m in members if m.weight.fqn.startswith("layers.")]


# What a rank holds and sends.


def spec(fqn: str, units: int, num_ranks: int, *, is_fp8: bool = True) -> WeightSpec:
    numel = units * TILE - 100 if is_fp8 else units
    return WeightSpec(fqn, units, numel, 4, num_ranks, is_fp8, is_fp8)


def layout_of(*weights: WeightSpec) -> BucketLayout:
    (layout,) = plan_buckets(weights, padding_limit=float("inf"))
    return layout


@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_the_buckets_buffers(is_fp8: bool, dtype: torch.dtype) -> None:
    precision = Precision(dtype, dtype, torch.float32, "fp32", False)
    layout = layout_of(*[spec(f"w{i}", 3 + i, 1, is_fp8=is_fp8) for i in range(9)])
    sizes = rank_bytes(layout, precision, dtype, keep_transposed=False)
    bucket = Bucket(
        layout,
        DataParallelMesh(None, None),
        precision=precision,
        ring=GradientRing(),
        device=torch.device("cpu"),
    )
    assert sizes.main == bucket.main.nbytes
    assert sizes.moments == 2 * bucket.main.to(dtype).nbytes
    assert sizes.payload == bucket._payload.nbytes
    assert sizes.gradient == bucket._empty_gradient().nbytes
    assert sizes.reduced_gradient == bucket.main.nbytes
    if is_fp8:
        real = sum(3 + i for i in range(9))
        assert (sizes.codes, sizes.scale_inv, sizes.values) == (real * TILE - 900, real * 4, 0)
    else:
        assert (sizes.codes, sizes.scale_inv) == (0, 0)
        assert sizes.values == layout.real_numel * dtype.itemsize


def test_costs_of_a_bucket_by_hand() -> None:
    layout = layout_of(spec("w", 7, 4))  # 2 tiles a rank, 1 of padding
    numel = 7 * TILE - 100
    bf16 = step_cost("bf16", layout, PRECISION)
    assert bf16.reduce == numel * 4 * 3 / 4
    assert bf16.gather == numel * 2 * 3 / 4
    assert bf16.memory == numel / 4 * (4 + 8 + 16 + 2)
    megatron = step_cost("megatron", layout, PRECISION) + amax_cost([layout])
    assert megatron.reduce == bf16.reduce
    assert megatron.gather == numel * 3 / 4
    assert megatron.amax == 2 * 7 * 4 * 3 / 4
    assert megatron.memory == numel / 4 * (4 + 8 + 16 + 8 + 1)
    assert megatron.collectives_by_kind == (1, 1, 1)
    ours = step_cost("block", layout, PRECISION)
    assert ours.reduce == 4 * (2 * TILE + 16) * 4 * 3 / 4  # 16: which weights were used
    payload = 2 * TILE + 16  # two scales, and padding
    assert ours.gather == 4 * payload * 3 / 4
    assert ours.memory == 2 * TILE * 28 + payload + 2 * 4 * payload
    assert ours.amax == 0
    assert ours.collectives_by_kind == (1, 0, 1)


def test_hsdp_adds_an_all_reduce_of_the_shard_and_micro_batches_multiply() -> None:
    layout = layout_of(spec("w", 8, 4))
    once = step_cost("block", layout, PRECISION)
    hsdp = step_cost("block", layout, PRECISION, replicas=2)
    assert hsdp.reduce - once.reduce == 2 * (2 * TILE + 16) * 4 / 2
    assert hsdp.collectives_by_kind == (1, 1, 1)
    each = step_cost("block", layout, PRECISION, replicas=2, reductions=3)
    assert each.reduce == 3 * hsdp.reduce
    assert each.gather == hsdp.gather
    assert each.collectives_by_kind == (3, 3, 1)
    single = step_cost("block", layout_of(spec("w", 8, 1)), PRECISION)
    assert (single.sent, single.collectives) == (0, 0)


def test_times_are_bytes_over_bandwidths() -> None:
    cost = StepCost(reduce=3e9, amax=1e9, gather=1e9, memory=8e12)
    bandwidths = Bandwidths(network=50, memory=4000)
    assert bandwidths.communication_ms(cost) == pytest.approx(100)
    assert bandwidths.update_ms(cost) == pytest.approx(2000)
    assert bandwidths.step_ms(cost) == pytest.approx(2100)


@pytest.mark.parametrize("mib", [1, 10_000])
def test_collectives_follow_buckets_not_parameters(mib: int) -> None:
    plan = planned("deepseek_v3_debug", 4, "--blockwise_fp8.bucket_mib", str(mib))
    (rank,) = plan.ranks
    for mesh, cost in rank.cost_by_mesh("block").items():
        buckets = [bucket for bucket in rank.buckets["block"] if bucket.mesh == mesh]
        assert cost.collectives_by_kind == (len(buckets), 0, len(buckets))
        if mib == 10_000:  # all FP8 weights of a mesh in one bucket, all others in another
            assert len(buckets) == (1 if mesh.has_experts else 2)
            assert sum(len(bucket.layout.members) for bucket in buckets) > 14
    megatron = rank.cost("megatron").collectives
    assert megatron == rank.cost("block").collectives + 2  # one amax all-reduce a mesh


def test_gradient_buffers_are_a_ring_unless_micro_batches_add_up() -> None:
    buckets = ("--blockwise_fp8.bucket_mib", "2")
    (ring,) = planned("llama3_debug", 2, *buckets).ranks
    sizes = [bucket.bytes.gradient for bucket in ring.buckets["block"]]
    expected = sum(size * min(sizes.count(size), RING_BUFFERS) for size in set(sizes))
    assert ring.gradient_buffers("block") == expected < sum(sizes)
    twice = ("--training.global_batch_size", "16")
    (full,) = planned("llama3_debug", 2, *buckets, *twice).ranks
    assert (full.backwards, full.reductions) == (2, 1)
    assert full.gradient_buffers("block") == sum(sizes)
    each = ("--blockwise_fp8.accumulation", "every_microbatch")
    (every,) = planned("llama3_debug", 2, *buckets, *twice, *each).ranks
    assert (every.backwards, every.reductions) == (2, 2)
    assert every.gradient_buffers("block") == expected
    assert every.cost("block").reduce == 2 * full.cost("block").reduce


# Meshes.


def test_tp_names_the_weights_whose_blocks_are_cut() -> None:
    plan = planned("llama3_debug", 8, *degrees(tp=4))
    split = {s.fqn: s for s in plan.split_blocks}
    assert split["layers.0.feed_forward.w1.weight"][1:] == ((768, 256), (192, 256), 12, 16)
    assert split["layers.5.attention.wo.weight"][1:] == ((256, 256), (256, 64), 4, 8)
    assert len(split) == 7 * 6
    two = planned("llama3_debug", 8, *degrees(tp=2)).split_blocks
    assert two == []  # 384 and 128 rows are whole blocks
    ring = [bucket.mesh for bucket in plan.ranks[0].buckets["block"]]
    assert {str(mesh) for mesh in ring} == {"fsdp 2 x tp 4"}


@pytest.mark.parametrize(
    ("config", "world_size", "overrides", "meshes"),
    [
        ("llama3_debug", 8, degrees(replicate=2), {"dp_replicate 2 x fsdp 4"}),
        ("llama3_debug", 8, degrees(cp=2), {"fsdp 8"}),
        ("llama3_debug", 8, degrees(cp=8), {"fsdp 8"}),
        ("llama3_debug", 1, [], {"one rank"}),
        ("llama3_debug", 4, degrees(tp=4), {"tp 4"}),
        ("deepseek_v3_debug", 8, degrees(ep=4), {"fsdp 8", "efsdp 2 x ep 4"}),
        ("deepseek_v3_debug", 8, degrees(ep=1), {"fsdp 8"}),
        (
            "deepseek_v3_debug",
            16,
            degrees(replicate=2, ep=4),
            {"dp_replicate 2 x fsdp 8", "dp_replicate 2 x efsdp 2 x ep 4"},
        ),
        # EP takes its ranks from TP where experts are not tensor parallel.
        ("deepseek_v3_debug", 8, degrees(tp=2, ep=4), {"fsdp 4 x tp 2", "efsdp 2 x ep 4"}),
        (
            "deepseek_v3_debug",
            8,
            degrees(tp=2, ep=2, etp=2),
            {"fsdp 4 x tp 2", "efsdp 2 x ep 2 x etp 2"},
        ),
    ],
)
def test_meshes(config: str, world_size: int, overrides: list[str], meshes: set[str]) -> None:
    plan = planned(config, world_size, *overrides)
    (rank,) = plan.ranks
    assert {str(bucket.mesh) for bucket in rank.buckets["block"]} == meshes


def test_virtual_stages_are_those_of_the_schedule() -> None:
    interleaved = ("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B")
    plan = planned("llama3_debug", 4, *degrees(pp=2), *interleaved)
    assert [rank.stages for rank in plan.ranks] == [[0, 2], [1, 3]]
    stages = {
        bucket.stage: {fqn.split(".")[1] for fqn in fqns_of(bucket)}
        for rank in plan.ranks
        for bucket in rank.buckets["block"]
        if bucket.layout.is_fp8
    }
    assert stages == {0: {"0"}, 1: {"1", "2"}, 2: {"3", "4"}, 3: {"5"}}


def test_stages_named_in_the_config(tmp_path: Path) -> None:
    parts = [["tok_embeddings", "layers.0"], [f"layers.{i}" for i in range(1, 6)]]
    parts[1] += ["norm", "output"]
    text = (CONFIGS / "llama3_debug.toml").read_text()
    key = f"[parallelism]\nmodule_fqns_per_model_part = {json.dumps(parts)}"
    path = tmp_path / "config.toml"
    path.write_text(text.replace("[parallelism]", key))
    plan = make_plan(load_planned_job(path, degrees(pp=2), 4))
    assert [rank.stages for rank in plan.ranks] == [[0], [1]]
    fp8 = [
        sum(len(b.layout.members) for b in rank.buckets["block"] if b.layout.is_fp8)
        for rank in plan.ranks
    ]
    assert fp8 == [7, 35]


def test_no_process_group_and_meshes_as_before() -> None:
    plan = planned("deepseek_v3_debug", 8, *degrees(ep=4))
    assert not dist.is_initialized()
    assert device_mesh.DeviceMesh is not GrouplessMesh
    with pytest.raises(ValueError, match="process group"):
        device_mesh.get_rank()
    assert plan.degrees["efsdp"] == 2


# Bad input.


@pytest.mark.parametrize(
    ("config", "world_size", "overrides", "message"),
    [
        ("llama3_debug", None, [], "say how many with --world-size"),
        ("llama3_debug", 6, degrees(tp=4), "6 ranks do not fit.*--world-size"),
        ("deepseek_v3_debug", 8, degrees(ep=3), "expert_parallel_degree = 3.*--world-size"),
        ("llama3_baseline", 2, [], 'no "blockwise_fp8"'),
        ("llama3_debug", 2, ["--model.flavor", "9B"], "flavor.*8B.*'9B'"),
        ("llama3_debug", 2, ["--training.enable_cpu_offload"], "enable_cpu_offload"),
        (
            "llama3_debug",
            3,
            [*degrees(tp=3), "--training.seq_len", "192"],
            r"tok_embeddings.weight: dim 0 .*multiple of the size 3",
        ),
        ("llama3_debug", 18, degrees(pp=9), "stages"),
        ("deepseek_v3_671b_pp8_ep32_dp2", 1024, degrees(cp=2), "Context Parallel"),
        ("llama3_debug", 2, ["--blockwise_fp8.fqns", "nothing.*"], "matches no module"),
    ],
)
def test_what_cannot_be_planned_is_said(
    config: str, world_size: int | None, overrides: list[str], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        planned(config, world_size, *overrides)


# What is printed, written and drawn.


def test_the_command_prints_writes_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", f"{tmp_path}/new/plan.json", "--png", f"{tmp_path}/new/plan.png"]
    config = str(CONFIGS / "deepseek_v3_debug.toml")
    rates = ["--network-gbps", "25", "--memory-gbps", "3000"]
    options = [*rates, "--strategy", "both", *files, *degrees(pp=2, tp=2, ep=4)]
    assert cli.main(["plan", config, "--world-size", "16", *options]) == 0
    printed = capsys.readouterr().out
    assert "on 16 ranks: pp 2 x fsdp 4 x tp 2, experts on efsdp 2 x ep 4" in printed
    assert "25 GB/s that a rank sends and 3000 GB/s of its memory" in printed
    assert "estimates" in printed
    assert "…" not in printed, "a table is cut off"
    for title in SCHEMES.values():
        assert title in printed
    assert 'What ranks own, strategy "param": 8 of 16 ranks shown' in printed
    assert (tmp_path / "new/plan.png").read_bytes().startswith(b"\x89PNG")

    plan = json.loads((tmp_path / "new/plan.json").read_text())
    assert plan["estimated_from"] == {"network_gb_per_s": 25, "memory_gb_per_s": 3000}
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(16))
    dims = ("pp", "fsdp", "tp", "efsdp", "ep")
    assert len({tuple(rank[dim] for dim in dims) for rank in plan["ranks"]}) == 16
    for strategy in ("block", "param"):
        whole = plan["padding"][strategy]["all"]
        assert sum(rank[strategy]["tiles"] for rank in plan["ranks"]) == whole["tiles"]
        assert sum(r[strategy]["padding_tiles"] for r in plan["ranks"]) == whole["padding"]
        for rank in plan["pipeline_ranks"]:
            for bucket in rank["buckets"][strategy]:
                assert sum(bucket["owned_units"]) == bucket["real_units"]
                held = bucket["units_per_rank"] * bucket["mesh"]["num_ranks"]
                assert held - bucket["real_units"] == bucket["padding_units"]


def test_the_configs_strategy_is_shown_and_bad_input_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = str(CONFIGS / "llama3_debug.toml")
    overrides = ["--world-size", "2", "--blockwise_fp8.strategy", "param"]
    assert cli.main(["plan", config, *overrides]) == 0
    assert 'Bytes on each rank, strategy "param"' in capsys.readouterr().out
    assert cli.main(["plan", config, "--world-size", "3", *degrees(tp=2)]) == 2
    assert "3 ranks do not fit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", config, "--network-gbps", "-1"])
    assert "-1 is not a positive number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "world_size", "rows"),
    [("llama3_debug", 2, 2), ("llama3_debug", 64, 64), ("llama3_debug", 200, DRAWN_RANKS)],
)
def test_a_picture_has_a_row_a_rank_up_to_a_bound(config: str, world_size: int, rows: int) -> None:
    plan = planned(config, world_size)
    (rank,) = plan.ranks
    axes = figure_of(plan, ["block"]).axes[0]
    bars = axes.collections
    padding, owned = bars[0 : 2 * rows : 2], bars[1 : 2 * rows : 2]
    names = [plan.job.config.model.name, f"{world_size:,} ranks"]
    assert all(name in axes.figure.get_suptitle() for name in names)
    expected = "64 of 200 ranks shown" if world_size == 200 else f"{world_size} ranks"
    assert expected in axes.get_title()
    drawn = max(
        (bucket for bucket in rank.buckets["block"] if not bucket.layout.is_fp8),
        key=lambda bucket: bucket.layout.padding_units / bucket.layout.real_units,
    )
    shown = sample(drawn.layout.num_ranks, DRAWN_RANKS)
    assert len(owned) == len(shown) == rows
    for bar, index in zip(owned, shown, strict=True):
        spans = [path.get_extents() for path in bar.get_paths()]
        assert sum(span.width for span in spans) == drawn.owned_units[index]
    for bar in padding:
        (path,) = bar.get_paths()
        assert path.get_extents().width == drawn.layout.units_per_rank
        assert bar.get_hatch()


def test_a_sample_has_both_ends() -> None:
    assert sample(3, 8) == [0, 1, 2]
    assert sample(2048, 3) == [0, 1023, 2047]
    for count in (64, 65, 1000):
        chosen = sample(count, 64)
        assert len(set(chosen)) == 64
        assert (chosen[0], chosen[-1]) == (0, count - 1)
