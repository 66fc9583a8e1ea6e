"""`shard_zero1` on 1 to 4 gloo ranks: same bits everywhere, collectives, memory, skips, misuse."""

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import (
    FLAT_SHAPES,
    FP8_SHAPES,
    OPTIMIZERS,
    SHAPES,
    Block,
    GivenGradients,
    Stack,
    assert_same,
    compute_weights,
    differing,
    everything,
    exact_gradients,
    local_state,
    main_values,
    my_samples,
    shard,
)
from ranks import rank_outcomes, run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_fp8zero import (
    BlockShard,
    BlockwiseAdamW,
    BlockwiseFP8Linear,
    clip_grad_norm_,
    dequantize_blockwise,
    quantize_blockwise,
    shard_zero1,
)
from titan_fp8zero.blocks import SMALLEST_NORMAL, num_tiles
from titan_fp8zero.layout import ELEMENT_ALIGNMENT
from titan_fp8zero.main_parameter import local_tensor, main_of
from titan_fp8zero.ring import RING_BUFFERS, GradientRing

pytestmark = pytest.mark.multirank

Snapshot = dict[str, torch.Tensor]
SMALL = {"plain": (256, 384), "odd": (130, 70), "norm": (97,)}


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def step_exactly(model: GivenGradients, optimizer: Any, step: int, **names: Any) -> None:
    """Backward of this rank's samples, step, zero_grad."""
    model(exact_gradients(model.shapes, step, my_samples())).backward()
    optimizer.step()
    optimizer.zero_grad()


# The same bits on any number of ranks, with any strategy and bucket size

LAYOUTS: dict[str, dict[str, Any]] = {
    "block": {},
    "block_many": {"bucket_bytes": 300_000},
    "block_unpooled": {"padding_limit": float("inf")},
    "block_pooled": {"padding_limit": 0.0},
    "param": {"strategy": "param"},
    "param_many": {"strategy": "param", "bucket_bytes": 300_000},
}


def train_exactly(mesh: DeviceMesh | None, optimizer: str, **options: Any) -> Snapshot:
    model = GivenGradients()
    _, built = shard(model, mesh, optimizer, **options)
    for step in range(5):
        step_exactly(model, built, step)
    return everything(model, built)


def layouts_of(optimizer: str) -> list[str]:
    return list(LAYOUTS) if optimizer == "foreach" else ["block_pooled", "param_many"]


def train_all_layouts() -> dict[tuple[str, str], Snapshot]:
    mesh = world_mesh()
    take = GradientRing.take
    # What a buffer holds before the first gradient must not matter.
    GradientRing.take = lambda *args: take(*args).fill_(torch.nan)  # type: ignore[method-assign]
    trained = {}
    for optimizer in OPTIMIZERS:
        for layout in layouts_of(optimizer):
            trained[optimizer, layout] = train_exactly(mesh, optimizer, **LAYOUTS[layout])
    # Every rank must hold the same compute weights: rank 0 has the last word, all compare.
    for key, snapshot in trained.items():
        theirs: list[Any] = [snapshot]
        dist.broadcast_object_list(theirs)
        assert not differing(snapshot, theirs[0]), key
    return trained if dist.get_rank() == 0 else {}


@functools.cache
def all_layouts(num_ranks: int) -> dict[tuple[str, str], Snapshot]:
    return run_ranks(train_all_layouts, num_ranks, timeout=240)[0]


@functools.cache
def single_process(optimizer: str) -> Snapshot:
    return train_exactly(None, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_same_bits(num_ranks, optimizer):
    for layout in layouts_of(optimizer):
        trained = all_layouts(num_ranks)[optimizer, layout]
        other = differing(trained, single_process(optimizer))
        if "fused" in optimizer:
            other = [name for name in other if not is_second_moment_of_flat(name)]
        assert not other, layout


def is_second_moment_of_flat(name: str) -> bool:
    return name.split(".")[1] in FLAT_SHAPES and name.endswith("exp_avg_sq")


def test_fused_second_moments_of_flat_parameters_have_the_same_bits():
    """The CPU's fused kernel rounds the tail of a tensor, below 16 elements, differently."""
    for num_ranks in (1, 2, 3, 4):
        for layout in layouts_of("fused"):
            other = differing(all_layouts(num_ranks)["fused", layout], single_process("fused"))
            other = [name for name in other if is_second_moment_of_flat(name)]
            assert not other, (num_ranks, layout)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_single_process_trains_as_stock(optimizer):
    """Against parameters that no line of ours has touched."""
    model = GivenGradients()
    parameters = {name: module.weight for name, module in model.weights.items()}
    stock = optimizer.removeprefix("blockwise_")
    built = OPTIMIZERS[stock](parameters.values())
    for step in range(5):
        for name, gradient in exact_gradients(SHAPES, step, my_samples()).items():
            parameters[name].grad = gradient
        built.step()
    trained = single_process(optimizer)
    for name, parameter in parameters.items():
        weight = parameter.detach()
        main = trained[f"weights.{name}.weight.main"]
        # Vectorized and scalar loops round differently, and folding moves the boundary.
        torch.testing.assert_close(main, weight, rtol=1e-6, atol=1e-7)
        if name in FLAT_SHAPES:
            assert torch.equal(trained[f"weights.{name}.weight.values"], main)
            continue
        codes, scale_inv = quantize_blockwise(main)
        assert torch.equal(trained[f"weights.{name}.weight.codes"], codes.view(torch.uint8))
        assert torch.equal(trained[f"weights.{name}.weight.scale_inv"], scale_inv)


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("round_main", [False, True])
def test_publishes_the_quantized_main_parameter(scale_format, round_main):
    model = GivenGradients(SMALL)
    _, optimizer = shard(
        model,
        None,
        compute_dtype=torch.bfloat16,
        scale_format=scale_format,
        round_main_to_bf16=round_main,
    )
    step_exactly(model, optimizer, 0)
    trained = everything(model)
    for name in ("plain", "odd"):
        main = trained[f"weights.{name}.weight.main"]
        main = main.bfloat16().float() if round_main else main
        codes, scale_inv = quantize_blockwise(main, scale_format)
        assert torch.equal(trained[f"weights.{name}.weight.codes"], codes.view(torch.uint8))
        assert torch.equal(trained[f"weights.{name}.weight.scale_inv"], scale_inv)
    values = trained["weights.norm.weight.values"]
    assert values.dtype == torch.bfloat16
    assert torch.equal(values, trained["weights.norm.weight.main"].bfloat16())


def train_in_bf16() -> Snapshot:
    model = GivenGradients(SMALL)
    _, optimizer = shard(
        model,
        world_mesh(),
        compute_dtype=torch.bfloat16,
        accumulate_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
    )
    for step in range(3):
        step_exactly(model, optimizer, step)
    return everything(model, optimizer)


def test_same_bits_with_bf16_gradients():
    """The gradients are exact in bf16, so that they are those of an fp32 run."""
    trained = run_ranks(train_in_bf16, 3)[0]
    model = GivenGradients(SMALL)
    _, optimizer = shard(model, None, compute_dtype=torch.bfloat16)
    for step in range(3):
        step_exactly(model, optimizer, step)
    assert_same(trained, everything(model, optimizer))


def reduce_in(accumulate_dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a weight whose two micro-batches, on two ranks, are thirds of integers."""
    model = GivenGradients({"plain": (128, 128)})
    shard(
        model,
        world_mesh(),
        accumulate_dtype=accumulate_dtype,
        reduce_dtype=reduce_dtype,
        backwards_per_step=2,
    )
    for micro in range(2):
        model({"plain": thirds(dist.get_rank(), micro)}).backward()
    return model.weights["plain"].weight.grad.full_tensor()[0]


def thirds(rank: int, micro: int) -> torch.Tensor:
    return torch.arange(128 * 128).view(128, 128).add(rank * 7 + micro * 3) / 3


def reduce_in_all_dtypes() -> dict[tuple[torch.dtype, torch.dtype], torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16)
    return {(a, r): reduce_in(a, r) for a in dtypes for r in dtypes}


def test_gradients_add_up_in_the_dtypes_asked_for():
    for (accumulate, reduce), reduced in run_ranks(reduce_in_all_dtypes, 2)[0].items():
        of_rank = []
        for rank in range(2):
            total = torch.zeros(128, 128, dtype=accumulate)
            for micro in range(2):
                total += thirds(rank, micro)
            of_rank.append(total.to(reduce))
        assert torch.equal(reduced, (of_rank[0] + of_rank[1]).float()), (accumulate, reduce)


def train_hsdp() -> list[Snapshot]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    trained = []
    for options in ({}, {"strategy": "param", "bucket_bytes": 300_000}):
        trained.append(train_exactly(mesh, "foreach", **options))
    placed = next(shard_hsdp_model(mesh).parameters())
    assert [str(p) for p in placed.placements] == ["R", "BS"]
    assert local_tensor(placed).shape[0] * 2 == placed.shape[0]
    return trained


def shard_hsdp_model(mesh: DeviceMesh) -> nn.Module:
    model = GivenGradients(SMALL)
    shard(model, mesh)
    return model


def test_hsdp_trains_as_one_process():
    for of_rank in run_ranks(train_hsdp, 4):
        for trained in of_rank:
            assert_same(trained, single_process("foreach"))


def shard_over_unnamed_mesh() -> None:
    shard(GivenGradients(SMALL), init_device_mesh("cpu", (2, 1)))


def test_an_unnamed_hsdp_mesh_works_or_is_refused_clearly():
    for outcome in rank_outcomes(shard_over_unnamed_mesh, 2):
        assert outcome.error is None or "ValueError" in outcome.error, outcome.error


# Main parameters are what FSDP2 users expect


def check_main_parameters() -> None:
    mesh = world_mesh()
    model = GivenGradients()
    before = {name: module.weight.detach().clone() for name, module in model.weights.items()}
    names = [name for name, _ in model.named_parameters()]
    zero1, optimizer = shard(model, mesh, padding_limit=float("inf"))
    assert [name for name, _ in model.named_parameters()] == names
    assert {id(p) for p in zero1.main_parameters} == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter.data, DTensor)
        assert type(parameter.placements[0]) is BlockShard
        assert parameter.dtype == torch.float32
        shape = SHAPES[name.split(".")[1]]
        is_fp8 = name.split(".")[1] in FP8_SHAPES
        units = num_tiles(shape) if is_fp8 else shape_numel(shape)
        quantum = mesh.size() * (1 if is_fp8 else ELEMENT_ALIGNMENT)
        assert parameter.shape[0] == -(-units // quantum) * quantum
    for name, weight in before.items():
        assert torch.equal(main_values(model)[f"weights.{name}.weight.main"], weight)
    # Moments have the local shape, not the global one.
    step_exactly(model, optimizer, 0)
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][key]
            assert isinstance(state, DTensor)
            assert state.shape == parameter.shape
            local = state.to_local()
            assert local.shape == parameter.to_local().shape
            assert local.shape[0] * mesh.size() == parameter.shape[0]
            assert local.untyped_storage().nbytes() == local.numel() * 4


def test_main_parameters_and_state_are_sharded():
    run_ranks(check_main_parameters, 3)


def shape_numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def check_state_dict() -> None:
    model = GivenGradients(SMALL)
    _, optimizer = shard(model, world_mesh())
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    before = compute_weights(model)
    step_exactly(model, optimizer, 0)
    assert differing(before, compute_weights(model))
    model.load_state_dict(saved)
    assert_same(before, compute_weights(model))


def test_loading_a_state_dict_publishes():
    run_ranks(check_state_dict, 2)


# Collectives of a step


class FlatScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(130))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def linears_and_norms(num_fp8: int, num_flat: int) -> nn.Sequential:
    linears = [BlockwiseFP8Linear(130, 130, bias=False) for _ in range(num_fp8)]
    return nn.Sequential(*linears, *[FlatScale() for _ in range(num_flat)])


def count_collectives(num_fp8: int, num_flat: int, optimizer: str) -> dict[str, int]:
    model = linears_and_norms(num_fp8, num_flat)
    zero1, built = shard(model, world_mesh(), optimizer)
    with CommDebugMode() as mode:
        model(torch.randn(2, 130)).square().sum().backward()
        norm = zero1.clip_grad_norm_(1.0)
        built.step()
        built.zero_grad()
    assert norm.isfinite()
    counts: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        kinds = [k for k in ("reduce_scatter", "all_gather", "all_reduce") if k in str(op)]
        (kind,) = kinds or [str(op)]
        counts[kind] = counts.get(kind, 0) + count
    return counts


MODELS = [(10, 0), (100, 0), (5, 5), (50, 50), (0, 10)]


def count_for_all_models(optimizer: str) -> list[dict[str, int]]:
    return [count_collectives(*model, optimizer) for model in MODELS]


@pytest.mark.parametrize("optimizer", ["foreach", "blockwise_fused"])
def test_collectives_of_a_step(optimizer):
    ten, hundred, mixed_ten, mixed_hundred, flat = run_ranks(count_for_all_models, 2, optimizer)[0]
    assert ten == hundred
    assert ten.pop("all_gather") in (1, 2)
    assert ten == {"reduce_scatter": 1, "all_reduce": 1}
    assert mixed_ten == mixed_hundred
    assert mixed_ten.pop("all_gather") in (2, 3)
    assert mixed_ten == {"reduce_scatter": 2, "all_reduce": 1}
    assert flat == {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}


# Memory


def live_bytes() -> int:
    """Of all tensors that Python can reach, each address once: storages may share memory."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, nn.Parameter):
                storage = thing.untyped_storage()
                address = storage.data_ptr()
                storages[address] = max(storage.nbytes(), storages.get(address, 0))
    return sum(storages.values())


class PeakBytes(TorchDispatchMode):
    """The largest total of what ops allocated and still lives, of dtypes of 2 bytes or more."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        inputs = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.element_size() > 1:
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: v for key, v in self._live.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def measure_memory(layers: int) -> dict[str, float]:
    """Bytes an FP8 element: resident after a step, and the peaks of its phases."""
    torch.manual_seed(0)
    before = live_bytes()
    dim = 256
    model = nn.Sequential(*[BlockwiseFP8Linear(dim, dim, bias=False) for _ in range(layers)])
    numel = layers * dim * dim
    assert live_bytes() - before == 4 * numel  # the counting sees fp32 weights
    zero1, optimizer = shard(
        model,
        world_mesh(),
        "blockwise_fused",
        compute_dtype=torch.bfloat16,
        bucket_bytes=4 * dim * dim,
        overlap=True,
    )
    zero1.wait_for_publish()
    measured = {"sharded": (live_bytes() - before) / numel}
    x = torch.randn(2, dim, dtype=torch.bfloat16)
    for _ in range(2):
        with PeakBytes() as backward:
            model(x).square().sum().backward()
        with PeakBytes() as step:
            zero1.clip_grad_norm_(1.0)
            optimizer.step()
        optimizer.zero_grad()
        with PeakBytes() as forward, torch.no_grad():
            model(x)
        with PeakBytes() as publish:
            zero1.publish_all()
            zero1.wait_for_publish()
    measured["trained"] = (live_bytes() - before) / numel
    for name, mode in (
        ("backward", backward),
        ("step", step),
        ("forward", forward),
        ("publish", publish),
    ):
        measured[name] = mode.peak / numel
    return measured


def test_no_rank_holds_a_wide_copy_of_all_weights():
    """Nothing wider than FP8 of all weights stays resident."""
    ranks, layers = 4, 32
    for measured in run_ranks(measure_memory, ranks, layers):
        # Codes on every rank, the main parameter and what it publishes on one, scales beside.
        resident = 1 + (4 + 1) / ranks
        assert resident <= measured["sharded"] < resident * 1.01 + 0.01
        resident += 8 / ranks  # two moments
        ring = RING_BUFFERS * 4 / layers  # fp32 gradients of a layer each
        assert resident < measured["trained"] < (resident + ring) * 1.01 + 0.01
        # Of 2 or 4 bytes an element, never more than a few layers and this rank's shard.
        few_layers = 4 * 4 / layers
        assert measured["forward"] < few_layers
        assert measured["publish"] < few_layers
        assert measured["step"] < few_layers + 4 / ranks
        assert measured["backward"] < few_layers + 4 / ranks + 1


# A non-finite gradient on one rank: every rank skips

CLIPPERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "none": lambda model, zero1: None,
    "zero1": lambda model, zero1: zero1.clip_grad_norm_(1.0),
    "stock": lambda model, zero1: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
}


def skip_steps(optimizer: str, clipper: str, bad: float) -> None:
    """A bad gradient on one rank alone must not make ranks disagree on the step."""
    model = GivenGradients(SMALL)
    zero1, built = shard(model, world_mesh(), optimizer)
    healthy = GivenGradients(SMALL)
    healthy_zero1, healthy_built = shard(healthy, world_mesh(), optimizer)

    def train(model: nn.Module, zero1: Any, built: Any, step: int, poison: str = "") -> None:
        gradients = {k: v.clone() for k, v in exact_gradients(SMALL, step, my_samples()).items()}
        if poison and dist.get_rank() == dist.get_world_size() - 1:
            gradients[poison].view(-1)[-1] = bad
        model(gradients).backward()
        CLIPPERS[clipper](model, zero1)
        built.step()
        built.zero_grad()

    for step, poison in enumerate(["", "odd", "", "norm", "plain", ""]):
        before = local_state(model, built)
        train(model, zero1, built, step, poison)
        after = local_state(model, built)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=False)]
        if poison:
            assert all(same), (step, poison)
            assert len(before) == len(after)
        else:
            assert not all(same)
            train(healthy, healthy_zero1, healthy_built, step)
        assert_same(compute_weights(model), compute_weights(healthy))
    assert zero1.skipped_steps == 3
    assert healthy_zero1.skipped_steps == 0
    assert_same(everything(model, built), everything(healthy, healthy_built))


def skip_steps_in_all_ways(bad: float) -> None:
    for optimizer in ("foreach", "blockwise_fused", "sgd"):
        for clipper in CLIPPERS:
            skip_steps(optimizer, clipper, bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_on_one_rank_skips_on_all(bad):
    run_ranks(skip_steps_in_all_ways, 3, bad)


def skip_by_hand() -> None:
    """The loop that looks at the norm itself: `if not norm.isfinite(): zero_grad(); continue`."""
    model = GivenGradients(SMALL)
    zero1, optimizer = shard(model, world_mesh(), "blockwise_fused")
    bad = {k: v.clone() for k, v in exact_gradients(SMALL, 0, my_samples()).items()}
    bad["odd"].fill_(float("nan"))
    model(bad).backward()
    assert not zero1.clip_grad_norm_(1.0).isfinite()
    optimizer.zero_grad()
    model(exact_gradients(SMALL, 1, my_samples())).backward()
    zero1.clip_grad_norm_(1.0)
    optimizer.step()
    trained = everything(model)
    codes, _ = quantize_blockwise(trained["weights.odd.weight.main"])
    assert torch.equal(trained["weights.odd.weight.codes"], codes.view(torch.uint8))


def test_a_step_after_one_that_the_user_skipped_is_published():
    run_ranks(skip_by_hand, 1)


def drop_clipped_gradients() -> None:
    """A clip factor, or a skip, belongs to the gradients that it was computed from."""
    model, expected = GivenGradients(SMALL), GivenGradients(SMALL)
    zero1, optimizer = shard(model, world_mesh(), "blockwise_fused")
    _, expected_optimizer = shard(expected, world_mesh(), "blockwise_fused")
    model(exact_gradients(SMALL, 0, my_samples())).backward()
    zero1.clip_grad_norm_(1e-3)
    optimizer.zero_grad()
    step_exactly(model, optimizer, 1)
    step_exactly(expected, expected_optimizer, 1)
    assert_same(everything(model, optimizer), everything(expected, expected_optimizer))


def test_zero_grad_drops_the_clip_factor():
    run_ranks(drop_clipped_gradients, 1)


def clip_in_both_ways() -> list[Snapshot]:
    trained = []
    for optimizer, clipper in (
        ("fused", "zero1"),
        ("fused", "function"),
        ("fused", "stock"),
        ("blockwise_fused", "zero1"),
        ("blockwise_fused", "function"),
    ):
        model = GivenGradients(SMALL)
        zero1, built = shard(model, world_mesh(), optimizer)
        for step in range(3):
            model(exact_gradients(SMALL, step, my_samples())).backward()
            if clipper == "zero1":
                zero1.clip_grad_norm_(0.5)
            elif clipper == "function":
                clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            built.step()
            built.zero_grad()
        trained.append(everything(model, built))
    return trained


def test_all_ways_to_clip_agree():
    for first, *others in run_ranks(clip_in_both_ways, 2):
        for other in others:
            assert_same(first, other)


# Accumulation

Backward = Callable[[nn.Module, dict[str, torch.Tensor]], None]


def count_reductions(mode: CommDebugMode) -> int:
    return sum(n for op, n in mode.get_comm_counts().items() if "reduce_scatter" in str(op))


def accumulate(how: str, optimizer: str) -> None:
    mesh = world_mesh()
    model, expected = GivenGradients(SMALL), GivenGradients(SMALL)
    backwards_per_step = 4 if how == "counted" else 1
    zero1, built = shard(model, mesh, optimizer, backwards_per_step=backwards_per_step)
    _, expected_built = shard(expected, mesh, optimizer)
    for step in range(3):
        reductions = []
        for micro in range(4):
            if how == "switched":
                zero1.set_requires_gradient_sync(micro == 3)
            sample = 4 * dist.get_rank() + micro
            with CommDebugMode() as mode:
                model(exact_gradients(SMALL, step, [sample])).backward()
            reductions.append(count_reductions(mode))
            if micro < 3 and how != "reduced":
                assert all(p.grad is None for p in model.parameters())
        # Two buckets: of tiles, and of flat parameters.
        assert reductions == [2 if how == "reduced" else 0] * 3 + [2]
        with CommDebugMode() as mode:
            built.step()
        assert count_reductions(mode) == 0
        built.zero_grad()
        first = 4 * dist.get_rank()
        expected(exact_gradients(SMALL, step, range(first, first + 4))).backward()
        expected_built.step()
        expected_built.zero_grad()
    assert_same(everything(model, built), everything(expected, expected_built))


def accumulate_in_all_ways() -> None:
    for how in ("counted", "switched", "reduced"):
        for optimizer in ("foreach", "blockwise_fused"):
            accumulate(how, optimizer)


def test_accumulation_reduces_once_a_step():
    """By count, by switch; without either, each backward reduces, and gradients add up as stock."""
    run_ranks(accumulate_in_all_ways, 3)


def step_too_early() -> None:
    model, expected = GivenGradients(SMALL), GivenGradients(SMALL)
    zero1, optimizer = shard(model, world_mesh(), backwards_per_step=4)
    _, expected_optimizer = shard(expected, world_mesh())
    before = local_state(model, optimizer)
    for _ in range(3):
        model(exact_gradients(SMALL, 0, my_samples())).backward()
    with pytest.raises(RuntimeError, match=r"3 of 4 backward passes"):
        optimizer.step()
    assert all(map(torch.equal, before, local_state(model, optimizer)))
    optimizer.zero_grad()
    zero1.set_requires_gradient_sync(False)
    model(exact_gradients(SMALL, 0, my_samples())).backward()
    with pytest.raises(RuntimeError, match=r"set_requires_gradient_sync\(False\)"):
        optimizer.step()
    assert all(map(torch.equal, before, local_state(model, optimizer)))
    # Nothing of the dropped passes is left.
    zero1.set_requires_gradient_sync(True)
    optimizer.zero_grad()
    for micro in range(4):
        model(exact_gradients(SMALL, 1, [4 * dist.get_rank() + micro])).backward()
    optimizer.step()
    first = 4 * dist.get_rank()
    expected(exact_gradients(SMALL, 1, range(first, first + 4))).backward()
    expected_optimizer.step()
    assert_same(everything(model, optimizer), everything(expected, expected_optimizer))


def test_a_step_after_too_few_backwards_says_so():
    run_ranks(step_too_early, 2)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


class FailsBetween(nn.Module):
    """Backward reaches `late`, then fails before `early`."""

    def __init__(self) -> None:
        super().__init__()
        self.early = BlockwiseFP8Linear(128, 128, bias=True)
        self.late = BlockwiseFP8Linear(128, 128, bias=True)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.early(x)
        return self.late(FailingBackward.apply(x) if self.fails else x)


def fail_in_backward(backwards_per_step: int, forget_zero_grad: bool, bucket_bytes: int) -> None:
    torch.manual_seed(0)
    models = [FailsBetween(), FailsBetween()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(4, 128) + dist.get_rank()
    trained = []
    for model, fails in zip(models, (True, False), strict=True):
        _, optimizer = shard(
            model, world_mesh(), bucket_bytes=bucket_bytes, backwards_per_step=backwards_per_step
        )
        if fails:
            model.fails = True
            with pytest.raises(ArithmeticError, match="on purpose"):
                model(x).sum().backward()
            model.fails = False
            if forget_zero_grad:
                with pytest.raises(RuntimeError, match=r"failed.*zero_grad"):
                    model(x).sum().backward()
            optimizer.zero_grad()
        for _ in range(backwards_per_step):
            model(x).sum().backward()
        optimizer.step()
        trained.append(everything(model, optimizer))
    assert_same(*trained)


@pytest.mark.parametrize("forget_zero_grad", [False, True])
@pytest.mark.parametrize("backwards_per_step", [1, 2])
def test_zero_grad_drops_what_a_failed_backward_left(backwards_per_step, forget_zero_grad):
    for bucket_bytes in (1, 1 << 30):  # reductions started before the failure, or none
        run_ranks(fail_in_backward, 2, backwards_per_step, forget_zero_grad, bucket_bytes)


def train_unattached() -> None:
    model, expected = GivenGradients(SMALL), GivenGradients(SMALL)
    zero1 = shard_zero1(model, world_mesh(), compute_dtype=torch.float32)
    _, expected_optimizer = shard(expected, world_mesh())
    with pytest.raises(RuntimeError, match="attach"):
        model(exact_gradients(SMALL, 0, my_samples())).backward()
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    zero1.attach(optimizer)
    optimizer.zero_grad()
    step_exactly(model, optimizer, 1)
    step_exactly(expected, expected_optimizer, 1)
    assert_same(everything(model, optimizer), everything(expected, expected_optimizer))


def test_training_without_an_attached_optimizer_says_so_and_can_go_on():
    run_ranks(train_unattached, 1)


# Frozen, tied and unused parameters


def freeze_some() -> None:
    model = GivenGradients(SMALL | {"tall": (576, 256), "small": (5,)})
    for name in ("odd", "norm"):
        model.weights[name].weight.requires_grad_(False)
    _, optimizer = shard(model, world_mesh())
    before = everything(model)
    codes, scale_inv = quantize_blockwise(before["weights.odd.weight.main"])
    assert torch.equal(before["weights.odd.weight.codes"], codes.view(torch.uint8))
    assert torch.equal(before["weights.odd.weight.scale_inv"], scale_inv)
    values = before["weights.norm.weight.values"]
    assert torch.equal(values, before["weights.norm.weight.main"])
    for step in range(2):
        gradients = exact_gradients(model.shapes, step, my_samples())
        with CommDebugMode() as mode:
            model(gradients).backward()
            optimizer.step()
        gathers = sum(n for op, n in mode.get_comm_counts().items() if "all_gather" in str(op))
        assert gathers == 2  # of the buckets of "plain" and "tall", and of "small": trainable
        for name, module in model.weights.items():
            parameter = next(module.parameters())
            frozen = name in ("odd", "norm")
            assert parameter.requires_grad is not frozen
            assert (parameter.grad is None) == frozen
            assert (len(optimizer.state.get(parameter, {})) == 0) == frozen
        optimizer.zero_grad()
    changed = differing(before, everything(model))
    assert not [name for name in changed if "odd" in name or "norm" in name]
    assert {name.split(".")[1] for name in changed} == {"plain", "tall", "small"}


def test_a_deleted_model_leaves_no_buffers():
    model = GivenGradients()
    zero1, optimizer = shard(model, None, "blockwise_foreach", overlap=True)
    step_exactly(model, optimizer, 0)
    buffers = [weakref.ref(bucket.main) for bucket in zero1._mains_of]
    del model, zero1, optimizer
    gc.collect()
    assert buffers and all(buffer() is None for buffer in buffers)


def test_frozen_parameters_are_published_once_and_have_no_moments():
    run_ranks(freeze_some, 2)


class Tied(nn.Module):
    """Two readers of one FP8 weight, and two of one high-precision weight."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 128)
        self.first = BlockwiseFP8Linear(128, 128, bias=False)
        self.second = BlockwiseFP8Linear(128, 128, bias=False)
        self.head = nn.Linear(128, 16, bias=False)
        if tie:
            self.second.weight = self.first.weight
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.second(torch.tanh(self.first(x)))).square().sum()


def train_tied() -> None:
    torch.manual_seed(0)
    tied, untied = Tied(tie=True), Tied(tie=False)
    untied.load_state_dict(tied.state_dict())
    assert len(list(tied.parameters())) == 2
    zero1, optimizer = shard(tied, world_mesh())
    shard(untied, world_mesh())
    assert len(zero1.main_parameters) == len(list(tied.parameters())) == 2
    assert tied.first.weight is tied.second.weight
    assert "second.weight" in dict(tied.named_parameters(remove_duplicate=False))
    tokens = torch.arange(8) + dist.get_rank()
    for model in (tied, untied):
        model(tokens).backward()

    actual, separate = main_gradients(tied), main_gradients(untied)
    for first, second in (("first", "second"), ("embedding", "head")):
        expected = separate[f"{first}.weight"] + separate[f"{second}.weight"]
        torch.testing.assert_close(actual[f"{first}.weight"], expected, rtol=1e-5, atol=1e-5)
    optimizer.step()
    zero1.wait_for_publish()
    assert tied.first._compute_weights["weight"] is tied.second._compute_weights["weight"]
    main = main_values(tied)["first.weight.main"]
    codes, _ = quantize_blockwise(main)
    assert torch.equal(tied.second._compute_weights["weight"].codes.float(), codes.float())


def test_tied_parameters_have_one_main_parameter():
    run_ranks(train_tied, 2)


USED = ("plain", "odd", "norm", "small", "one", "odd_experts")


def train_partly(unused: dict[int, list[str]], **options: Any) -> tuple[Snapshot, list[str]]:
    """5 steps in which each rank gives no gradient to some weights."""
    shapes = {name: SHAPES[name] for name in USED}
    model = GivenGradients(shapes)
    mesh = world_mesh() if dist.is_initialized() else None
    _, optimizer = shard(model, mesh, options.pop("optimizer", "foreach"), **options)
    ranks = [dist.get_rank()] if dist.is_initialized() else list(unused)
    no_gradient: list[str] = []
    for step in range(5):
        total: dict[str, torch.Tensor] = {}
        for rank in ranks:
            given = exact_gradients(shapes, step, range(rank, 12, len(unused)))
            for name in shapes:
                if name not in unused[rank]:
                    total[name] = total.get(name, 0) + given[name]
        (model(total) if total else torch.zeros((), requires_grad=True)).backward()
        no_gradient = [
            name for name, module in model.weights.items() if next(module.parameters()).grad is None
        ]
        optimizer.step()
        optimizer.zero_grad()
    return everything(model, optimizer), no_gradient


@pytest.mark.parametrize("layout", ["block", "block_many", "block_unpooled", "block_pooled"])
def test_a_weight_unused_on_one_rank_has_the_right_sum(layout):
    unused: dict[int, list[str]] = {0: ["plain", "odd_experts", "norm"], 1: [], 2: ["small", "odd"]}
    expected = single_partly(unused)[0]
    for trained, no_gradient in run_ranks(train_partly_with, 3, unused, layout, "foreach"):
        assert not no_gradient
        assert_same(trained, expected)


def train_partly_with(
    unused: dict[int, list[str]], layout: str, optimizer: str
) -> tuple[Snapshot, list[str]]:
    return train_partly(unused, optimizer=optimizer, **LAYOUTS[layout])


def single_partly(unused: dict[int, list[str]], **options: Any) -> tuple[Snapshot, list[str]]:
    return train_partly(unused, padding_limit=float("inf"), **options)


@pytest.mark.parametrize("optimizer", ["foreach", "blockwise_foreach", "sgd"])
def test_a_weight_unused_on_all_ranks_stays_as_it_is(optimizer):
    unused = {0: ["odd", "one", "small", "plain"], 1: ["odd", "one", "small"]}
    expected, expected_without = single_partly(unused, optimizer=optimizer)
    assert set(expected_without) == set(unused[1])
    initial = everything(sharded_alone())
    for layout in LAYOUTS:
        for trained, no_gradient in run_ranks(train_partly_with, 2, unused, layout, optimizer):
            if layout == "block_unpooled":  # each weight its own main parameter: as stock
                assert set(no_gradient) == set(unused[1])
                assert_same(trained, expected)
            compared = [n for n in expected if n.rsplit(".", 1)[1] in COMPARED]
            assert not differing(
                {n: trained[n] for n in compared}, {n: expected[n] for n in compared}
            ), layout
            for name in unused[1]:
                for part in COMPARED:
                    key = f"weights.{name}.weight.{part}"
                    if key in initial:
                        assert torch.equal(trained[key], initial[key]), (layout, key)


COMPARED = ("main", "codes", "scale_inv", "values")


def sharded_alone() -> nn.Module:
    model = GivenGradients({name: SHAPES[name] for name in USED})
    shard(model, None)
    return model


def skip_layer() -> None:
    """One rank skips a layer in some steps: right sums, no hang, also with buckets of one layer."""
    for bucket_bytes in (1, 1 << 30):
        torch.manual_seed(0)
        model = Stack(3, dim=128, hidden=130)
        reference = Stack(3, dim=128, hidden=130)
        reference.load_state_dict(model.state_dict())
        _, optimizer = shard(model, world_mesh(), bucket_bytes=bucket_bytes)
        _, reference_optimizer = shard(reference, None)
        for step in range(3):
            total = torch.zeros(())
            for rank in range(dist.get_world_size()):
                torch.manual_seed(10 * step + rank)
                x = torch.randn(4, 128)
                for stack in (model, reference):
                    if stack is model and rank != dist.get_rank():
                        continue
                    y = stack.stem(x)
                    for index, layer in enumerate(stack.layers):
                        if not (rank == 1 and index == step):
                            y = layer(y)
                    loss = stack.head(y).square().sum()
                    if stack is model:
                        loss.backward()
                    else:
                        total = total + loss
            total.backward()
            gradients = main_gradients(model), main_gradients(reference)
            for name, expected in gradients[1].items():
                torch.testing.assert_close(gradients[0][name], expected, rtol=1e-4, atol=1e-4)
            for built in (optimizer, reference_optimizer):
                built.zero_grad()


def main_gradients(model: nn.Module) -> Snapshot:
    """Gradients of main parameters with one member, padding cut off."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for member in main_of(parameter).layout.members:
            units = full[member.start : member.start + member.weight.units]
            found[f"{member.weight.fqn}"] = units
        assert name
    return found


def test_a_rank_may_skip_a_layer():
    run_ranks(skip_layer, 2)


def end_forward_early() -> None:
    """Rank 0 uses the first half of ten weights, each a bucket: its forward waits for no other."""
    shapes = {f"w{index}": (128, 128) for index in range(10)}
    trained = []
    for overlap in (False, True):
        model = GivenGradients(shapes)
        options = {"bucket_bytes": 1 << 16, "overlap": overlap}
        _, optimizer = shard(model, world_mesh(), "blockwise_foreach", **options)
        for step in range(3):
            gradients = exact_gradients(shapes, step, my_samples())
            used = list(gradients)[: 5 if dist.get_rank() == 0 else 10]
            model({name: gradients[name] for name in used}).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(everything(model, optimizer))
    assert_same(*trained)


def test_a_forward_may_end_early_while_weights_are_published():
    run_ranks(end_forward_early, 2, timeout=30.0)


def fail_within_a_step() -> None:
    """The update of one of two weights of a bucket raises; from the next step on the other one is
    updated first."""
    model = GivenGradients({"plain": (256, 384), "experts": (3, 128, 256)})
    zero1 = shard_zero1(model, world_mesh(), compute_dtype=torch.float32)
    plain, experts = zero1.main_parameters
    groups = [{"params": [experts]}, {"params": [plain]}]
    optimizer = BlockwiseAdamW(groups, lr=0.1, foreach=True)
    groups = optimizer.param_groups
    zero1.attach(optimizer)
    for step in range(3):
        model(exact_gradients(model.shapes, step, my_samples())).backward()
        if step == 0:
            betas, groups[1]["betas"] = groups[1]["betas"], None
            with pytest.raises(TypeError):
                optimizer.step()
            groups[1]["betas"] = betas
            groups.reverse()
        else:
            optimizer.step()
            zero1.wait_for_publish()
            for weight in (w for main in map(main_of, zero1.main_parameters) for w in main.weights):
                whole = weight.gather(local_tensor(weight.parameter.detach()))
                assert torch.equal(
                    weight.compute.codes.float(), quantize_blockwise(whole)[0].float()
                )
        optimizer.zero_grad()


def test_a_step_that_fails_leaves_no_stale_payload():
    run_ranks(fail_within_a_step, 2)


def skip_expert() -> None:
    """Rank 1 sends no token to expert 0 and rank 0 none at all through the second experts."""
    from titan_fp8zero import BlockwiseFP8GroupedExperts

    torch.manual_seed(0)

    def experts() -> nn.ModuleList:
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / 8)

        return nn.ModuleList(
            [
                BlockwiseFP8GroupedExperts(weight(2, 72, 64), weight(2, 64, 72), weight(2, 72, 64))
                for _ in range(2)
            ]
        )

    model, reference = experts(), experts()
    _, optimizer = shard(model, world_mesh())
    _, reference_optimizer = shard(reference, None)
    total = torch.zeros(())
    for rank in range(2):
        x = torch.randn(6, 64)
        counts = torch.tensor([[4, 2], [0, 6]][rank])
        for modules in (model, reference):
            if modules is model and rank != dist.get_rank():
                continue
            loss = modules[0](x, counts).square().sum()
            if rank == 1:
                loss = loss + modules[1](x, counts).square().sum()
            if modules is model:
                loss.backward()
            else:
                total = total + loss
    total.backward()
    actual, expected = main_gradients(model), main_gradients(reference)
    assert expected["0.w1"].abs().max() > 0.01
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)
    optimizer.step()
    reference_optimizer.step()


def test_a_rank_may_skip_an_expert():
    run_ranks(skip_expert, 2)


def own_only_padding() -> Snapshot:
    model = GivenGradients({"one": (1, 1), "single": (1,)})
    zero1, optimizer = shard(model, world_mesh())
    for step in range(3):
        model(exact_gradients(model.shapes, step, my_samples())).backward()
        assert zero1.clip_grad_norm_(1.0).isfinite()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() > 0:
        for parameter in model.parameters():
            assert local_tensor(parameter.detach()).count_nonzero() == 0
    return everything(model, optimizer)


def test_a_rank_may_own_only_padding():
    """Many buckets, and ranks that own only padding."""
    model = GivenGradients({"one": (1, 1), "single": (1,)})
    zero1, optimizer = shard(model, None)
    for step in range(3):
        model(exact_gradients(model.shapes, step, range(12))).backward()
        zero1.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    for trained in run_ranks(own_only_padding, 4):
        assert_same(trained, everything(model, optimizer))


def drop_use_of_pooled() -> None:
    """What a dropped backward used does not count as used in the next step."""
    model = GivenGradients({"norm": (97,), "small": (5,)})
    _, optimizer = shard(model, world_mesh(), strategy="param")
    before = main_values(model)["weights.small.weight.main"]
    gradients = exact_gradients(model.shapes, 0, my_samples())
    model(gradients).backward()
    optimizer.zero_grad()
    model({"norm": gradients["norm"]}).backward()
    optimizer.step()
    assert torch.equal(main_values(model)["weights.small.weight.main"], before)


def test_zero_grad_forgets_which_pooled_weights_were_used():
    run_ranks(drop_use_of_pooled, 2)


def use_pooled_late() -> None:
    model = GivenGradients({"norm": (97,), "small": (5,)})
    _, optimizer = shard(model, world_mesh(), strategy="param")
    gradients = exact_gradients(model.shapes, 0, my_samples())
    model({"norm": gradients["norm"]}).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(gradients).backward()
    with pytest.raises(RuntimeError, match=r"small.*padding_limit"):
        optimizer.step()


def test_a_pooled_weight_used_in_some_steps_only_is_refused():
    """Its step count is that of its main parameter: the result would not be stock's."""
    run_ranks(use_pooled_late, 2)


def train_with_two_optimizers() -> None:
    """One optimizer for each kind; pooled weights that are unused stay."""
    models = [GivenGradients(SHAPES), GivenGradients(SHAPES)]
    trained = []
    for model, split in zip(models, (False, True), strict=True):
        zero1 = shard_zero1(model, world_mesh(), compute_dtype=torch.float32, strategy="param")
        is_fp8 = [main_of(p).layout.members[0].weight.is_fp8 for p in model.parameters()]
        groups = [
            [p for p, fp8 in zip(model.parameters(), is_fp8, strict=True) if fp8 is wanted]
            for wanted in (True, False)
        ]
        built = [
            OPTIMIZERS["foreach"](g) for g in (groups if split else [[*groups[0], *groups[1]]])
        ]
        for optimizer in built:
            zero1.attach(optimizer)
        for step in range(2):
            gradients = dict(exact_gradients(SHAPES, step, my_samples()))
            for unused in ("odd", "norm"):
                gradients.pop(unused)
            model(gradients).backward()
            zero1.clip_grad_norm_(1.0)
            for optimizer in built:
                optimizer.step()
            for optimizer in built:
                optimizer.zero_grad()
        trained.append(everything(model))
    assert_same(*trained)


def test_two_optimizers_train_as_one():
    run_ranks(train_with_two_optimizers, 2)


# Misuse

Maker = Callable[[], Any]


def make_optimizer_before() -> None:
    model = GivenGradients(SMALL)
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    zero1 = shard_zero1(model, None)
    with pytest.raises(ValueError, match=r"\(256, 384\).*after shard_zero1"):
        zero1.attach(optimizer)


def attach_foreign_optimizer() -> None:
    zero1 = shard_zero1(GivenGradients(SMALL), None)
    other = GivenGradients(SMALL)
    shard_zero1(other, None)
    with pytest.raises(ValueError, match="no main parameter of this model"):
        zero1.attach(OPTIMIZERS["foreach"](other.parameters()))


def shard_twice() -> None:
    model = GivenGradients(SMALL)
    shard_zero1(model, None)
    with pytest.raises(ValueError, match=r"weights\.plain\.weight.*twice"):
        shard_zero1(model, None)


def shard_meta() -> None:
    with torch.device("meta"):
        model = BlockwiseFP8Linear(128, 128)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        shard_zero1(model, None)


def shard_bad_dtypes() -> None:
    model = BlockwiseFP8Linear(128, 128, bias=False)
    for name in ("compute_dtype", "accumulate_dtype", "reduce_dtype"):
        with pytest.raises(ValueError, match=name):
            shard_zero1(model, None, **{name: torch.float16})
    model.weight = nn.Parameter(torch.zeros(128, 128, dtype=torch.int32), requires_grad=False)
    with pytest.raises(TypeError, match=r"weight must be .*int32"):
        shard_zero1(model, None)
    codes = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
    model.weight = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(TypeError, match=r"weight must be .*float8_e4m3fn"):
        shard_zero1(model, None)


def shard_bad_options() -> None:
    for options, message in (
        ({"scale_format": "fp16"}, "scale_format"),
        ({"backwards_per_step": 0}, "backwards_per_step"),
        ({"strategy": "flat"}, "strategy"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"padding_limit": -1.0}, "padding_limit"),
    ):
        model = GivenGradients(SMALL)
        parameters = dict(model.named_parameters())
        with pytest.raises(ValueError, match=message):
            shard_zero1(model, None, **options)
        assert dict(model.named_parameters()) == parameters  # nothing was changed
    with pytest.raises(ValueError, match="no parameters"):
        shard_zero1(nn.ReLU(), None)
    with pytest.raises(ValueError, match=r"weight has no elements: shape \(0, 4\)"):
        shard_zero1(nn.Linear(4, 0, bias=False), None)


def tie_mismatched() -> None:
    model = nn.Sequential(BlockwiseFP8Linear(128, 128, False), nn.Linear(128, 128, False))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one tied parameter"):
        shard_zero1(model, None)


def convert_sharded() -> None:
    model = nn.ModuleDict({"block": Block(128, 130), "given": GivenGradients(SMALL)})
    _, optimizer = shard(model, None)
    model["given"](exact_gradients(SMALL, 0, range(12))).backward()
    before = local_state(model, optimizer)
    pointers = [t.data_ptr() for t in map(local_tensor, model.parameters())]
    for convert in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to("cpu"),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.double(),
        lambda m: m.share_memory(),
    ):
        for module in (model, model["block"], model["block"].up, nn.ModuleList([model["block"]])):
            with pytest.raises(RuntimeError, match="sharded by shard_zero1"):
                convert(module)
    assert all(map(torch.equal, before, local_state(model, optimizer)))
    assert [t.data_ptr() for t in map(local_tensor, model.parameters())] == pointers
    optimizer.step()


def read_main_of_stranger() -> None:
    assert main_of(torch.zeros(2)) is None
    assert local_tensor(torch.ones(2)).sum() == 2


@pytest.mark.parametrize(
    "misuse",
    [
        make_optimizer_before,
        attach_foreign_optimizer,
        shard_twice,
        shard_meta,
        shard_bad_dtypes,
        shard_bad_options,
        tie_mismatched,
        convert_sharded,
        read_main_of_stranger,
    ],
)
def test_misuse_is_refused_by_name(misuse):
    misuse()


def shard_over_3d_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="3 dims"):
        shard_zero1(GivenGradients(SMALL), mesh)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = BlockwiseFP8Linear(128, 128, bias=False)
    model.weight = nn.Parameter(
        DTensor.from_local(torch.zeros(64, 128), other, [Shard(0)], run_check=False)
    )
    with pytest.raises(ValueError, match=r"weight is a DTensor over mesh dims \('tp',\)"):
        shard_zero1(model, world_mesh())


def test_unfit_meshes_are_refused_by_name():
    run_ranks(shard_over_3d_mesh, 2)


# Expert parallelism: weights on another mesh

EXPERT_SHAPES = {
    "plain": (130, 40),
    "experts": (4, 130, 20),
    "columns": (4, 10, 130),
    "biases": (4, 70),
    "norm": (97,),
}
EXPERTS = ("experts", "columns", "biases")


class ExpertModel(nn.Module):
    """As GivenGradients; "biases" are high-precision weights under expert parallelism."""

    def __init__(self) -> None:
        super().__init__()
        given = GivenGradients({n: s for n, s in EXPERT_SHAPES.items() if n != "biases"})
        self.weights = given.weights
        flat = GivenGradients({"norm": EXPERT_SHAPES["biases"]}).weights["norm"]
        self.weights["biases"] = flat

    forward = GivenGradients.forward


def place_experts(weight: nn.Parameter, mesh: DeviceMesh, shard_dim: int) -> nn.Parameter:
    """As FSDP2 leaves an expert weight on ("efsdp", "ep")."""
    efsdp, ep = mesh.get_coordinate()
    local = weight.detach().chunk(2, 0)[ep].chunk(2, shard_dim)[efsdp].clone()
    inner = Shard(1) if shard_dim else _StridedShard(0, split_factor=2)
    return nn.Parameter(
        DTensor.from_local(
            local,
            mesh,
            [inner, Shard(0)],
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    )


def train_experts() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    _, ep = mesh.get_coordinate()
    model = ExpertModel()
    for name in EXPERTS:
        given = model.weights[name]
        given.weight = place_experts(given.weight, mesh, shard_dim=int(name == "columns"))
    zero1, optimizer = shard(model, flat, expert_mesh=mesh["efsdp"])
    norms = []
    for step in range(3):
        gradients = random_gradients(step, dist.get_rank())
        for name in EXPERTS:
            gradients[name] = gradients[name].chunk(2)[ep]
        model(gradients).backward()
        norms.append(zero1.clip_grad_norm_(1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    placements = {
        name: [str(p) for p in next(module.parameters()).placements]
        for name, module in model.weights.items()
    }
    return {"norms": norms, "computed": compute_weights(model), "placements": placements, "ep": ep}


def random_gradients(step: int, rank: int) -> dict[str, torch.Tensor]:
    """Of one rank: sums are exact. Few elements, because fp32 norms of many are 3e-6 off."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randint(-999, 1000, shape, generator=generator) * 2.0 ** (-10 - index)
        for index, (name, shape) in enumerate(EXPERT_SHAPES.items())
    }


def test_experts_on_another_mesh():
    """The norm; and the codes right after a step, for dense and experts."""
    outcomes = run_ranks(train_experts, 4)
    stock = ExpertModel()
    parameters = {name: module.weight for name, module in stock.weights.items()}
    optimizer = OPTIMIZERS["foreach"](parameters.values())
    for step in range(3):
        # Ranks are (efsdp, ep) row-major. Expert gradients add up over efsdp: ranks of one ep.
        for name, parameter in parameters.items():
            of_rank = [random_gradients(step, rank)[name] for rank in range(4)]
            if name in EXPERTS:
                halves = [of_rank[ep].chunk(2)[ep] + of_rank[2 + ep].chunk(2)[ep] for ep in (0, 1)]
                parameter.grad = torch.cat(halves)
            else:
                parameter.grad = sum(of_rank)
        squares = [p.grad.double().square().sum() for p in parameters.values()]
        norm = torch.stack(squares).sum().sqrt().item()
        for outcome in outcomes:
            assert outcome["norms"][step] == outcomes[0]["norms"][step]
            assert outcome["norms"][step] == pytest.approx(norm, rel=1e-6)
        optimizer.step()
    for outcome in outcomes:
        assert outcome["placements"]["experts"] == ["BS", "S(0)"]
        assert outcome["placements"]["plain"] == ["BS"]
        computed = outcome["computed"]
        for name, parameter in parameters.items():
            weight = parameter.detach()
            weight = weight.chunk(2)[outcome["ep"]] if name in EXPERTS else weight
            if name in FLAT_SHAPES or name == "biases":
                torch.testing.assert_close(computed[f"weights.{name}.weight.values"], weight)
                continue
            scale_inv = computed[f"weights.{name}.weight.scale_inv"]
            codes = computed[f"weights.{name}.weight.codes"].view(torch.float8_e4m3fn)
            expected_codes, expected_scale = quantize_blockwise(weight)
            torch.testing.assert_close(scale_inv, expected_scale, rtol=1e-6, atol=0)
            assert (codes.view(torch.uint8) != expected_codes.view(torch.uint8)).sum() < 10
            torch.testing.assert_close(
                dequantize_blockwise(codes, scale_inv), weight, rtol=1 / 16, atol=1e-2
            )


# Zero blocks, tiny blocks and rows that are no multiple of 128, through the whole path


class Extreme(nn.Module):
    """Weights of hard values."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ModuleDict()
        for name, value in values.items():
            self.weights[name] = given = given_gradient_of(value)
            assert given.fp8_weights

    forward = GivenGradients.forward


def given_gradient_of(value: torch.Tensor) -> nn.Module:
    module = GivenGradients({"plain": tuple(value.shape)}).weights["plain"]
    module.weight.data.copy_(value)
    return module


def extreme_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    single = torch.zeros(256, 256)
    single[3, 200] = 1.0
    values = {"zeros": torch.zeros(256, 256), "single": single}
    for exponent in (10, 30, 38, 42):
        noise = torch.rand(200, 130, generator=generator) * 2 - 1
        values[f"amax_1e_{exponent}"] = noise * 10.0**-exponent
    values["kv_a_proj_with_mqa"] = torch.randn(576, 7168, generator=generator) / 85
    return values


def train_extremes(scale_format: str) -> dict[str, torch.Tensor]:
    values = extreme_values()
    model = Extreme(values)
    zero1, optimizer = shard(model, world_mesh(), scale_format=scale_format)
    published = compute_weights(model)
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    zeros["kv_a_proj_with_mqa"] = torch.full((576, 7168), 0.5)
    model(zeros).backward()
    zero1.clip_grad_norm_(1.0)
    optimizer.step()
    assert zero1.skipped_steps == 0
    published |= {f"after.{name}": value for name, value in compute_weights(model).items()}
    return published


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_hard_values(scale_format):
    for published in run_ranks(train_extremes, 2, scale_format):
        for name, weight in extreme_values().items():
            for prefix in ("", "after."):
                key = f"{prefix}weights.{name}.weight"
                scale_inv = published[f"{key}.scale_inv"]
                codes = published[f"{key}.codes"].view(torch.float8_e4m3fn)
                value = dequantize_blockwise(codes, scale_inv)
                assert value.isfinite().all()
                assert scale_inv.isfinite().all()
                assert (scale_inv >= SMALLEST_NORMAL).all()
                if name == "zeros":
                    assert (scale_inv == 1).all()
                    assert not value.any()
                elif prefix == "":
                    # 3 mantissa bits, and what is below the smallest subnormal code of the block.
                    bound = weight.abs() / 16 + scale_inv.max() * 2.0**-10 * 1.01
                    assert ((value - weight).abs() <= bound).all()
        single = published["weights.single.weight.scale_inv"]
        assert (single == 1).sum() == 3
        kv = extreme_values()["kv_a_proj_with_mqa"] * (1 - 1e-3) - 1e-2  # AdamW's first step
        after = "after.weights.kv_a_proj_with_mqa.weight"
        codes = published[f"{after}.codes"].view(torch.float8_e4m3fn)
        value = dequantize_blockwise(codes, published[f"{after}.scale_inv"])
        torch.testing.assert_close(value, kv, rtol=1 / 14, atol=2e-4)
