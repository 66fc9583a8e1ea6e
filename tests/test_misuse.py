"""Uses of `Zero1` that must say what is wrong, or do what stock optimizers do. One process."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn

from titan_fp8zero import BlockwiseAdamW, BlockwiseFP8Linear, clip_grad_norm_, shard_zero1
from titan_fp8zero.titan.config import BlockwiseFP8


def sharded(optimizer_cls=BlockwiseAdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(BlockwiseFP8Linear(200, 300), nn.SiLU(), nn.Linear(300, 3))
    zero1 = shard_zero1(model, None, compute_dtype=torch.float32, **options)
    optimizer = optimizer_cls(model.parameters(), lr=1e-2)
    zero1.attach(optimizer)
    return model, zero1, optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(1))
    return model(x).square().sum()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, BlockwiseAdamW])
def test_a_nan_inside_a_closure_skips_the_step(optimizer_cls):
    model, zero1, optimizer = sharded(optimizer_cls)
    before = weights_of(model)

    def closure(factor: float) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model) * factor
        loss.backward()
        return loss

    optimizer.step(lambda: closure(float("nan")))
    assert same(before, weights_of(model))
    assert zero1.skipped_steps == 1
    assert optimizer.step(closure=lambda: closure(1.0)).isfinite()
    assert not same(before, weights_of(model))
    assert zero1.skipped_steps == 1


def test_clipping_takes_all_main_parameters_and_no_others():
    model, zero1, _ = sharded()
    loss_of(model).backward()
    some = list(model.parameters())[1:]
    with pytest.raises(ValueError, match="all 4 main parameters"):
        clip_grad_norm_(some, 1.0)
    with pytest.raises(ValueError, match="1 other tensors"):
        clip_grad_norm_([*model.parameters(), torch.zeros(3)], 1.0)
    assert zero1.clip_grad_norm_(1.0).isfinite()


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, BlockwiseAdamW])
def test_clipping_twice_keeps_the_first_clip_and_reports_the_clipped_norm(optimizer_cls):
    once, _, optimizer = sharded(optimizer_cls)
    loss_of(once).backward()
    clip_grad_norm_(once.parameters(), 1e-2)
    optimizer.step()
    twice, _, optimizer = sharded(optimizer_cls)
    loss_of(twice).backward()
    clip_grad_norm_(twice.parameters(), 1e-2)
    norm = clip_grad_norm_(twice.parameters(), float("inf"))
    assert norm == pytest.approx(1e-2, rel=1e-3)  # the factor has 1e-6 in its denominator
    optimizer.step()
    assert same(weights_of(once), weights_of(twice))


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, BlockwiseAdamW])
def test_clipping_without_gradients_gives_a_norm_of_zero(optimizer_cls):
    _, zero1, optimizer = sharded(optimizer_cls)
    assert zero1.clip_grad_norm_(1.0) == 0
    optimizer.step()
    assert zero1.skipped_steps == 0


def test_a_step_after_a_failed_backward_is_an_error():
    model, _, optimizer = sharded()
    before = weights_of(model)
    hook = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="backward that failed"):
        optimizer.step()
    assert same(before, weights_of(model))
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert not same(before, weights_of(model))


def test_a_step_without_the_reducing_backward_says_how_many_were_not_reduced():
    model, zero1, optimizer = sharded()
    zero1.set_requires_gradient_sync(False)
    loss_of(model).backward()
    loss_of(model).backward()
    zero1.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="after 2 backward passes under set_requires"):
        optimizer.step()


def test_freezing_after_sharding_is_an_error_that_names_the_weight():
    model, _, _ = sharded()
    model[2].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"2\.weight, 2\.bias was changed after"):
        loss_of(model).backward()


def test_attaching_twice_is_an_error():
    _, zero1, optimizer = sharded()
    with pytest.raises(ValueError, match="attached already"):
        zero1.attach(optimizer)


@pytest.mark.parametrize("copy_model", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copy_model):
    model, _, _ = sharded()
    for module in (model, model[0], model[2]):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            copy_model(module)


@pytest.mark.parametrize("steps_a_backward", [1, 2])
def test_two_optimizers_in_turn_leave_an_unused_pooled_weight_alone(steps_a_backward):
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = BlockwiseFP8Linear(200, 300)
            self.used, self.unused = nn.Linear(300, 3), nn.Linear(300, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.body(x))

    torch.manual_seed(0)
    model = TwoHeads()
    zero1 = shard_zero1(model, None, compute_dtype=torch.float32, strategy="param")
    before = model.unused._compute_weights["weight"].detach().clone()
    tiles, values = zero1.main_parameters
    optimizers = [torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1) for p in (tiles, values)]
    for optimizer in optimizers:
        zero1.attach(optimizer)
    for _ in range(3):
        loss_of(model).backward()
        for optimizer in optimizers * (steps_a_backward - 1):
            optimizer.step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.unused._compute_weights["weight"], before)


def test_main_parameters_and_scales_are_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, zero1, _ = sharded()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {main.dtype for main in zero1.main_parameters} == {torch.float32}
    assert model[0]._compute_weights["weight"].scale_inv.dtype == torch.float32


def test_an_ordinary_state_dict_loads_into_a_sharded_model():
    torch.manual_seed(3)
    plain = nn.Sequential(BlockwiseFP8Linear(200, 300), nn.SiLU(), nn.Linear(300, 3))
    model, _, _ = sharded()
    assert not torch.equal(loss_of(model), loss_of(plain))
    model.load_state_dict(plain.state_dict())
    assert torch.equal(loss_of(model), loss_of(plain))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fqns", "layers.*"),
        ("fqns", [1]),
        ("strategy", "tile"),
        ("scale_format", "fp16"),
        ("main_round", "bfloat16"),
        ("wgrad", "fp16"),
        ("gemm", "cutlass"),
        ("bucket_mib", "big"),
        ("bucket_mib", 0),
        ("padding_limit", -0.1),
        ("padding_limit", "none"),
    ],
)
def test_a_bad_value_in_the_table_names_its_key(key, value):
    with pytest.raises(ValueError, match=rf"\[blockwise_fp8\] {key} must be"):
        BlockwiseFP8(**{key: value})
