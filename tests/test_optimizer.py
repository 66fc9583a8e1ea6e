"""`BlockwiseAdamW` against `torch.optim.AdamW`, to the bit: updates, state, clipping, schedules."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import (
    GivenGradients,
    assert_same,
    everything,
    exact_gradients,
    main_values,
    my_samples,
)
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import titan_fp8zero.optimizer as optimizer_module
from titan_fp8zero import BlockwiseAdamW, quantize_blockwise, shard_zero1, unfold
from titan_fp8zero.bucket import Bucket, Payload
from titan_fp8zero.main_parameter import main_of
from titan_fp8zero.publish import IN_FLIGHT

SHAPES = {"plain": (256, 384), "odd": (130, 70), "experts": (3, 128, 130), "norm": (97,)}
IMPLEMENTATIONS: list[dict[str, bool]] = [
    {},
    {"foreach": True},
    {"fused": True},
    {"foreach": False, "fused": False},
]
HYPERPARAMETERS: list[dict[str, Any]] = [
    {"lr": 1e-2},
    {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 1e-3, "weight_decay": 0.0},
]


def build(
    optimizer: type[torch.optim.AdamW], mesh: Any = None, **arguments: Any
) -> tuple[nn.Module, Any, torch.optim.AdamW]:
    model = GivenGradients(SHAPES)
    zero1 = shard_zero1(model, mesh, compute_dtype=torch.float32)
    built = optimizer(model.parameters(), **arguments)
    zero1.attach(built)
    return model, zero1, built


def train(
    optimizer: type[torch.optim.AdamW],
    mesh: Any = None,
    *,
    max_norm: float | None = None,
    steps: int = 3,
    **arguments: Any,
) -> dict[str, torch.Tensor]:
    model, zero1, built = build(optimizer, mesh, **arguments)
    for step in range(steps):
        model(exact_gradients(SHAPES, step, my_samples())).backward()
        if max_norm is not None:
            zero1.clip_grad_norm_(max_norm)
        built.step()
        built.zero_grad()
    return everything(model, built)


@pytest.mark.parametrize("max_norm", [None, 0.3, 1e9])
@pytest.mark.parametrize("hyperparameters", HYPERPARAMETERS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_adamw(implementation, hyperparameters, max_norm):
    arguments = implementation | hyperparameters
    assert_same(
        train(BlockwiseAdamW, max_norm=max_norm, **arguments),
        train(torch.optim.AdamW, max_norm=max_norm, **arguments),
    )


def train_both_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for implementation in IMPLEMENTATIONS:
        for max_norm in (None, 0.3):
            arguments = {"max_norm": max_norm, "lr": 1e-2, "weight_decay": 0.1, **implementation}
            assert_same(
                train(BlockwiseAdamW, mesh, **arguments),
                train(torch.optim.AdamW, mesh, **arguments),
            )


@pytest.mark.multirank
def test_equals_adamw_on_three_ranks():
    run_ranks(train_both_on_ranks, 3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_adamw_on_plain_tensors(implementation):
    """Without `shard_zero1` it is an AdamW as any."""
    trained = []
    for optimizer in (BlockwiseAdamW, torch.optim.AdamW):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(33, 7, generator=generator)) for _ in range(3)]
        built = optimizer(parameters, lr=0.1, weight_decay=0.1, **implementation)
        for _ in range(3):
            for parameter in parameters[:2]:
                parameter.grad = torch.randn(33, 7, generator=generator)
            built.step()
        assert parameters[2] not in built.state
        trained.append({str(i): p.detach() for i, p in enumerate(parameters)})
    assert_same(*trained)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_state_has_the_names_types_and_order_of_adamw(implementation):
    states = []
    for optimizer in (BlockwiseAdamW, torch.optim.AdamW):
        model, _, built = build(optimizer, lr=1e-3, **implementation)
        model(exact_gradients(SHAPES, 0, my_samples())).backward()
        built.step()
        states.append(built.state_dict())
    ours, stock = states
    assert ours["param_groups"] == stock["param_groups"]
    assert list(ours["state"]) == list(stock["state"])
    for index, state in stock["state"].items():
        assert list(ours["state"][index]) == list(state)
        for key, value in state.items():
            assert type(ours["state"][index][key]) is type(value)
            assert ours["state"][index][key].dtype == value.dtype
            assert torch.equal(ours["state"][index][key], value)


def state_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, _, optimizer = build(BlockwiseAdamW, mesh, lr=1e-3)
    model(exact_gradients(SHAPES, 0, my_samples())).backward()
    optimizer.step()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert not isinstance(state["step"], DTensor)
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].placements == parameter.placements
            assert state[key].to_local().shape == parameter.to_local().shape
            assert state[key].dtype == torch.float32
    # Moments lie end to end in memory, and are copied and saved each on its own.
    state_dict = optimizer.state_dict()
    stored = io.BytesIO()
    torch.save(state_dict, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(state_dict), torch.load(stored, weights_only=False)):
        for index, state in state_dict["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(copied["state"][index][key].to_local(), state[key].to_local())


@pytest.mark.multirank
def test_moments_are_sharded_as_their_parameter():
    run_ranks(state_on_ranks, 3)


@pytest.mark.parametrize("first", [BlockwiseAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("second", [BlockwiseAdamW, torch.optim.AdamW])
def test_state_dict_round_trip(first, second):
    """Also from one to the other; the continued run is that of one without a break."""
    arguments = {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}
    expected = train(BlockwiseAdamW, steps=4, **arguments)
    model, _, optimizer = build(first, **arguments)
    for step in range(2):
        model(exact_gradients(SHAPES, step, my_samples())).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, _, resumed_optimizer = build(second, lr=0.5)
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    for step in range(2, 4):
        resumed(exact_gradients(SHAPES, step, my_samples())).backward()
        resumed_optimizer.step()
        resumed_optimizer.zero_grad()
    assert_same(everything(resumed, resumed_optimizer), expected)


def test_a_gradient_of_zeros_counts_as_in_torch():
    """Of a weight that a backward did not use, where gradients are set to zero and not to None."""
    model, _, optimizer = build(BlockwiseAdamW, lr=1e-2, weight_decay=0.1)
    mine = dict(model.named_parameters())["weights.norm.weight"]
    expected = mine.detach().clone().requires_grad_()
    stock = torch.optim.AdamW([expected], lr=1e-2, weight_decay=0.1)
    for step, names in enumerate([set(SHAPES), {"plain"}, set(SHAPES)]):
        used = {name: shape for name, shape in SHAPES.items() if name in names}
        model(exact_gradients(used, step, my_samples())).backward()
        expected.grad = mine.grad.clone()
        for built in (optimizer, stock):
            built.step()
            built.zero_grad(set_to_none=False)
        assert torch.equal(mine, expected)


def test_a_state_that_is_rolled_back_starts_from_zeros():
    trained = []
    for optimizer in (BlockwiseAdamW, torch.optim.AdamW):
        model, _, built = build(optimizer, lr=1e-2)
        before = copy.deepcopy(built.state_dict())
        for step in range(3):
            model(exact_gradients(SHAPES, step, my_samples())).backward()
            built.step()
            built.zero_grad()
            if step == 1:
                built.load_state_dict(before)
        trained.append(everything(model, built))
    assert_same(*trained)


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    ],
)
def test_schedulers_work(make_scheduler, recwarn):
    trained = []
    for optimizer in (BlockwiseAdamW, torch.optim.AdamW):
        model, _, built = build(optimizer, lr=1e-2)
        scheduler = make_scheduler(built)
        rates = []
        for step in range(4):
            model(exact_gradients(SHAPES, step, my_samples())).backward()
            built.step()
            scheduler.step()
            built.zero_grad()
            rates.append(built.param_groups[0]["lr"])
        assert len(set(rates)) == 4
        trained.append(everything(model, built))
    assert_same(*trained)
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_param_groups_and_closure():
    trained = []
    for optimizer in (BlockwiseAdamW, torch.optim.AdamW):
        model = GivenGradients(SHAPES)
        zero1 = shard_zero1(model, None, compute_dtype=torch.float32)
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            (others if "norm" in name else decayed).append(parameter)
        built = optimizer(
            [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 0.5}], lr=1e-2
        )
        zero1.attach(built)
        loss = torch.tensor(7.0)
        model(exact_gradients(SHAPES, 0, my_samples())).backward()
        assert built.step(lambda loss=loss: loss) is loss
        trained.append(everything(model, built))
    assert_same(*trained)


def test_clipping_leaves_gradients_and_is_used_once():
    model, zero1, optimizer = build(BlockwiseAdamW, lr=1e-2)
    model(exact_gradients(SHAPES, 0, my_samples())).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = zero1.clip_grad_norm_(0.5)
    torch.testing.assert_close(
        norm.double(), torch.stack([g.double().norm() for g in before]).norm(), rtol=1e-5, atol=0
    )
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert optimizer.clip_factor.item() == pytest.approx(0.5 / (norm.item() + 1e-6))
    optimizer.step()
    assert optimizer.clip_factor is None


def test_bf16_moments_are_rounded_after_each_update():
    model, _, optimizer = build(BlockwiseAdamW, lr=1e-2, moment_dtype=torch.bfloat16)
    parameter = model.weights["plain"].weight
    expected = torch.optim.AdamW([parameter.detach().clone().requires_grad_()], lr=1e-2)
    (other,) = expected.param_groups[0]["params"]
    for step in range(3):
        model(exact_gradients(SHAPES, step, range(12))).backward()
        other.grad = parameter.grad.clone()
        for built in (optimizer, expected):
            built.step()
        for name in ("exp_avg", "exp_avg_sq"):
            rounded = expected.state[other][name].bfloat16()
            assert torch.equal(optimizer.state[parameter][name], rounded)
            expected.state[other][name] = rounded.float()
        assert torch.equal(parameter, other)
        optimizer.zero_grad()
    _, _, loaded = build(BlockwiseAdamW, lr=1e-2, moment_dtype=torch.bfloat16)
    loaded.load_state_dict(optimizer.state_dict())
    for before, after in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert after["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(before["exp_avg"], after["exp_avg"])


BETAS = (0.875, 1 - 2.0**-8)
"""torch's own fused kernel rounds 1 - beta to fp32, of most betas a different number."""


def assert_one_pass_is_close_to_two(
    device: str, moment_dtype: torch.dtype, max_norm: float | None
) -> None:
    """Three fused steps; groups, decay, bias correction and clipping; and what is published."""
    trained = []
    for fused in (True, False):
        model = GivenGradients(SHAPES).to(device)
        zero1 = shard_zero1(model, None, compute_dtype=torch.float32)
        decayed, *others = model.parameters()
        groups = [{"params": [decayed], "weight_decay": 0.5}, {"params": others, "lr": 0.1}]
        built = BlockwiseAdamW(groups, lr=1e-2, betas=BETAS, fused=fused, moment_dtype=moment_dtype)
        zero1.attach(built)
        for step in range(3):
            gradients = exact_gradients(SHAPES, step, my_samples())
            model({name: gradient.to(device) for name, gradient in gradients.items()}).backward()
            if max_norm is not None:
                zero1.clip_grad_norm_(max_norm)
            built.step()
            built.zero_grad()
        for parameter in zero1.main_parameters:
            (weight,) = main_of(parameter).weights
            if weight.is_fp8:
                codes, scale_inv = quantize_blockwise(unfold(parameter.detach(), weight.shape))
                assert torch.equal(weight.compute.codes.float(), codes.float())
                assert torch.equal(weight.compute.scale_inv, scale_inv)
        trained.append(main_values(model, built))
    # bf16 moments that fp32 roundings tip over are a bf16 unit apart; terms may cancel afterwards.
    rounding = 2.0**-8 if moment_dtype == torch.bfloat16 else 2.0**-20
    for name, expected in trained[1].items():
        tolerance = rounding * expected.float().abs().max().item()
        torch.testing.assert_close(
            trained[0][name].float().cpu(), expected.float().cpu(), rtol=rounding, atol=tolerance
        )


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_updating_and_quantizing_in_one_pass(monkeypatch, moment_dtype, max_norm):
    """The way that GPUs take, with the kernel's definition on a CPU."""
    takes_one_pass = optimizer_module._takes_one_pass
    taken = []

    def take_on_any_device(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        assert not takes_one_pass(parameter, group)
        taken.append(bool(group["fused"] and main_of(parameter).bucket.is_fp8))
        return taken[-1]

    monkeypatch.setattr(optimizer_module, "_takes_one_pass", take_on_any_device)
    assert_one_pass_is_close_to_two("cpu", moment_dtype, max_norm)
    assert taken == [*[True, True, True, False] * 3, *[False] * 12]


def test_one_pass_launches_once_a_bucket(monkeypatch):
    """On the units of all main parameters between two without a gradient, with the results of one
    launch a main parameter; also after a load."""
    fp8 = {"a": (256, 384), "b": (130, 70), "c": (3, 128, 130), "d": (128, 256)}
    launches: list[int] = []
    update = Payload.update_and_write

    def count(payload: Any, units: torch.Tensor, *args: Any) -> None:
        launches.append(len(units))
        update(payload, units, *args)

    def is_tiled(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        return main_of(parameter).bucket.is_fp8

    def one_by_one(columns: list[list[torch.Tensor]]) -> list[slice]:
        return [slice(row, row + 1) for row in range(len(columns[0]))]

    monkeypatch.setattr(optimizer_module, "_takes_one_pass", is_tiled)
    monkeypatch.setattr(Payload, "update_and_write", count)
    trained = []
    for runs in (optimizer_module.adjacent_runs, one_by_one):
        monkeypatch.setattr(optimizer_module, "adjacent_runs", runs)
        model = GivenGradients(fp8 | {"norm": (97,)})
        zero1 = shard_zero1(model, None, compute_dtype=torch.float32)
        optimizer = BlockwiseAdamW(model.parameters(), lr=1e-2, moment_dtype=torch.bfloat16)
        zero1.attach(optimizer)
        for step, absent in enumerate([{"b"}, {"a"}, set(), set()]):
            if step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            shapes = {name: shape for name, shape in model.shapes.items() if name not in absent}
            model(exact_gradients(shapes, step, my_samples())).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(everything(model, optimizer))
    # Tiles: a 6, b 2, c 6, d 2.
    assert launches == [6, 8, 10, 16, 16, *[6, 6, 2], *[2, 6, 2], *[6, 2, 6, 2] * 2]
    assert_same(*trained)


def test_publishing_starts_as_soon_as_a_bucket_is_updated(monkeypatch):
    """In forward order; where a weight that shares a main parameter stays as it is, later."""
    shapes = {"norm": (97,), "a": (256, 384), "b": (130, 70), "c": (3, 128, 130)}
    events: list[str] = []
    write, start = Payload.write, Bucket.start_publish

    def note_write(payload: Payload, main: torch.Tensor) -> None:
        events.append(f"write {len(main)}")
        write(payload, main)

    def note_start(bucket: Bucket) -> None:
        events.append(f"publish {bucket.layout.units_per_rank}")
        start(bucket)

    def events_of(steps: list[set[str]], **options: Any) -> list[str]:
        model = GivenGradients(shapes)
        zero1 = shard_zero1(model, None, **options)
        optimizer = BlockwiseAdamW(model.parameters(), lr=1e-2)
        zero1.attach(optimizer)
        for step, names in enumerate(steps):
            events.clear()
            used = {name: shape for name, shape in shapes.items() if name in names}
            model(exact_gradients(used, step, my_samples())).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(events)

    monkeypatch.setitem(IN_FLIGHT, "cpu", 4)
    monkeypatch.setattr(Payload, "write", note_write)
    monkeypatch.setattr(Bucket, "start_publish", note_start)
    # Units: norm 97 and padding, a 6 tiles, b 2, c 6.
    everyone = set(shapes)
    assert events_of([everyone], bucket_bytes=1024) == [
        *("write 112", "publish 112", "write 6", "publish 6"),
        *("write 2", "publish 2", "write 6", "publish 6"),
    ]
    assert events_of([everyone - {"b"}], bucket_bytes=1024) == [
        *("write 112", "publish 112", "write 6", "publish 6", "write 6"),
        *("write 2", "publish 2", "publish 6"),
    ]
    assert events_of([everyone, everyone - {"b"}], strategy="param") == [
        *("write 112", "write 14"),
        *("write 112", "publish 112", "write 14", "publish 14"),
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_one_pass_on_a_gpu(moment_dtype, max_norm):
    assert_one_pass_is_close_to_two("cuda", moment_dtype, max_norm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"maximize": True}, "maximize"),
        ({"differentiable": True}, "differentiable"),
        ({"capturable": True}, "capturable"),
        ({"lr": torch.tensor(1e-3)}, "lr as a float"),
        ({"lr": -1.0}, "learning rate"),
        ({"moment_dtype": torch.float16}, "moment_dtype"),
        ({"betas": (1.0, 0.9)}, "beta"),
        ({"foreach": True, "fused": True}, "foreach"),
    ],
)
def test_refusals_name_the_argument(arguments, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        BlockwiseAdamW([nn.Parameter(torch.zeros(2))], **arguments)


def test_refusals_hold_for_param_groups_and_loaded_state():
    parameter = nn.Parameter(torch.ones(2))
    for name in ("amsgrad", "maximize"):
        with pytest.raises(ValueError, match=name):
            BlockwiseAdamW([{"params": [parameter], name: True}])
    stock = torch.optim.AdamW([parameter], amsgrad=True)
    parameter.grad = torch.ones(2)
    stock.step()
    with pytest.raises(ValueError, match="amsgrad"):
        BlockwiseAdamW([parameter]).load_state_dict(stock.state_dict())
