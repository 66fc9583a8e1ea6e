"""`BlockwiseFP8Linear`: accuracy, gradients on carriers, what it saves, compiled equal to eager."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from titan_fp8zero.blocks import dequantize_blockwise, quantize_blockwise
from titan_fp8zero.compute_weight import FP8Weight, gradient_carrier, reader_class
from titan_fp8zero.linear import BlockwiseFP8Linear

DTYPES = (torch.float32, torch.bfloat16)
WGRADS = ("bf16", "fp8")
SHAPES = [(300, 200), (576, 256), (256, 384)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise, in dB."""
    exact, actual = exact.double(), actual.double()
    return 10 * torch.log10(exact.square().sum() / (exact - actual).square().sum()).item()


def bind(linear: BlockwiseFP8Linear, dtype: torch.dtype) -> list[torch.Tensor]:
    """Give `linear` a compute weight as `shard_zero1` does; returns where gradients arrive."""
    codes, scale_inv = quantize_blockwise(linear.weight.detach(), linear.config.scale_format)
    carrier = gradient_carrier(linear.weight.shape, dtype, codes.device)
    linear._compute_weights = {"weight": FP8Weight(codes.contiguous(), scale_inv, carrier)}
    gradients: list[torch.Tensor] = []

    def collect(leaf: torch.Tensor) -> None:
        gradients.append(leaf.grad)
        leaf.grad = None

    carrier.register_post_accumulate_grad_hook(collect)
    if linear.bias is not None:
        leaf = linear.bias.detach().to(dtype).requires_grad_()
        linear._compute_weights["bias"] = leaf
        linear.__class__ = reader_class(type(linear), ("bias",))
    return gradients


# Accuracy


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sqnr_against_fp32(shape, dtype, wgrad, scale_format):
    linear = nn.Linear(*shape)
    fp8 = BlockwiseFP8Linear.from_linear(
        copy.deepcopy(linear), wgrad=wgrad, scale_format=scale_format
    )
    x, dy = torch.randn(3, 50, shape[0]), torch.randn(3, 50, shape[1])
    exact_x, fp8_x = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    exact, out = linear(exact_x), fp8(fp8_x)
    exact.backward(dy)
    out.backward(dy.to(dtype))

    assert out.shape == exact.shape and out.dtype == dtype and fp8_x.grad.dtype == dtype
    assert sqnr(exact, out) >= 25
    assert sqnr(exact_x.grad, fp8_x.grad) >= 27
    assert sqnr(linear.weight.grad, fp8.weight.grad) >= 27
    assert sqnr(linear.bias.grad, fp8.bias.grad) >= (100 if dtype == torch.float32 else 45)
    assert fp8.weight.grad.dtype == fp8.bias.grad.dtype == torch.float32
    # Rounded once, to the dtype of the carrier, not to that of x before.
    assert not torch.equal(fp8.weight.grad, fp8.weight.grad.bfloat16().float())


@pytest.mark.parametrize("wgrad", WGRADS)
def test_is_exact_where_the_operands_are(wgrad):
    """Small integers under power-of-two scales: a wrong group, transpose or bias would show."""
    x, w, dy = (torch.randint(-3, 4, s).float() for s in ((170, 300), (200, 300), (170, 200)))
    fp8 = BlockwiseFP8Linear(300, 200, wgrad=wgrad, scale_format="ue8m0")
    with torch.no_grad():
        fp8.weight.copy_(w)
    x.requires_grad_()
    out = fp8(x)
    out.backward(dy)
    assert torch.equal(out, x @ w.t() + fp8.bias)
    assert torch.equal(x.grad, dy @ w)
    assert torch.equal(fp8.weight.grad, dy.t() @ x)
    assert torch.equal(fp8.bias.grad, dy.sum(0))


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_equals_unbound(dtype, wgrad):
    fp8 = BlockwiseFP8Linear(300, 200, wgrad=wgrad)
    with torch.no_grad():
        fp8.bias.copy_(fp8.bias.to(dtype))
    x, dy = torch.randn(4, 9, 300, dtype=dtype), torch.randn(4, 9, 200, dtype=dtype)
    results = []
    for bound in (False, True):
        gradients = bind(fp8, dtype) if bound else None
        x.requires_grad_().grad = None
        out = fp8(x)
        out.backward(dy)
        dw = gradients[0] if bound else fp8.weight.grad
        results.append((out, x.grad, dw.to(dtype), fp8.bias.grad.to(dtype)))
        if bound:
            assert len(gradients) == 1 and dw.dtype == dtype
            assert fp8._compute_weights["weight"].carrier.untyped_storage().nbytes() <= 4
    for unbound, bound in zip(*results, strict=True):
        assert torch.equal(unbound, bound)


def test_bound_module_reads_the_compute_weight_alone():
    fp8 = BlockwiseFP8Linear(130, 70, bias=False)
    bind(fp8, torch.float32)
    x = torch.randn(5, 130)
    before = fp8(x)
    with torch.no_grad():
        fp8.weight.fill_(float("nan"))
    assert torch.equal(fp8(x), before)
    fp8._compute_weights["weight"].scale_inv.mul_(2)
    assert torch.equal(fp8(x), 2 * before)


# Inputs


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("shape", [(300,), (0, 300), (2, 0, 300), (2, 3, 4, 300)])
def test_any_leading_dims(shape, wgrad):
    fp8 = BlockwiseFP8Linear(300, 200, wgrad=wgrad)
    x = torch.randn(shape, requires_grad=True)
    out = fp8(x)
    assert out.shape == (*shape[:-1], 200)
    out.sum().backward()
    assert x.grad.shape == shape
    assert fp8.weight.grad.any() == (x.numel() > 0)


def test_strided_x_and_dy():
    fp8 = BlockwiseFP8Linear(200, 300)
    x = torch.randn(200, 70).t().requires_grad_()
    dy = torch.randn(300, 70).t()
    results = []
    for make in (lambda t: t, lambda t: t.contiguous()):
        fp8.zero_grad()
        leaf = make(x.detach()).requires_grad_()
        out = fp8(leaf)
        out.backward(make(dy))
        results.append((out, leaf.grad, fp8.weight.grad))
    for strided, contiguous in zip(*results, strict=True):
        assert torch.equal(strided, contiguous)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"bfloat16 or float32, got x in {dtype}"):
        BlockwiseFP8Linear(4, 4)(torch.ones(2, 4, dtype=dtype))
    if dtype == torch.float16:
        with (
            torch.autocast("cpu", torch.float16),
            pytest.raises(TypeError, match=r"got x in torch.float16"),
        ):
            BlockwiseFP8Linear(4, 4)(torch.ones(2, 4))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_computes_in_its_dtype(compiled):
    fp8 = BlockwiseFP8Linear(300, 200, bias=False)
    x, dy = torch.randn(20, 300), torch.randn(20, 200).bfloat16()
    run = torch.compile(fp8, fullgraph=True) if compiled else fp8
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = run(leaf)
        out.backward(dy)
    expected_leaf = x.clone().requires_grad_()
    dw, fp8.weight.grad = fp8.weight.grad, None
    expected = fp8(expected_leaf.bfloat16())
    expected.backward(dy)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert torch.equal(leaf.grad, expected_leaf.grad)
    assert dw.dtype == torch.float32 and torch.equal(dw, fp8.weight.grad)


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_visible(bad, wgrad):
    fp8 = BlockwiseFP8Linear(300, 200, wgrad=wgrad)
    x, dy = torch.randn(10, 300, requires_grad=True), torch.randn(10, 200)
    with torch.no_grad():
        x[3, 290] = bad
    out = fp8(x)
    assert out[3].isnan().all()
    assert out[:3].isfinite().all() and out[4:].isfinite().all()
    out.backward(dy)
    assert not fp8.weight.grad[:, 290].isfinite().any()

    fp8.zero_grad()
    x = torch.randn(10, 300, requires_grad=True)
    dy[5, 199] = bad
    fp8(x).backward(dy)
    assert x.grad[5].isnan().all() and x.grad[:5].isfinite().all()
    assert not fp8.weight.grad[199].isfinite().any() and fp8.weight.grad[:199].isfinite().all()


# What it computes and keeps


class CountOps(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8zero":
            self.calls.append(func.name().removeprefix("titan_fp8zero::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wgrad", "x_grad", "w_grad", "forward", "backward"),
    [
        ("bf16", True, True, "rows", ["quantize_rows", "fp8_gemm_nt", "bf16_wgrad_tn"]),
        ("bf16", True, False, "rows", ["quantize_rows", "fp8_gemm_nt"]),
        ("bf16", False, True, "rows", ["bf16_wgrad_tn"]),
        (
            "fp8",
            True,
            True,
            "rows_and_columns",
            ["quantize_rows_and_columns", "fp8_gemm_nt", "fp8_wgrad_nt"],
        ),
        ("fp8", True, False, "rows", ["quantize_rows", "fp8_gemm_nt"]),
        ("fp8", False, True, "rows_and_columns", ["quantize_columns", "fp8_wgrad_nt"]),
    ],
)
def test_computes_only_the_gradients_asked_for(wgrad, x_grad, w_grad, forward, backward):
    fp8 = BlockwiseFP8Linear(300, 200, bias=False, wgrad=wgrad)
    bind(fp8, torch.float32)
    fp8._compute_weights["weight"].carrier.requires_grad_(w_grad)
    x = torch.randn(10, 300, requires_grad=x_grad)
    with CountOps() as ops:
        out = fp8(x)
    assert ops.calls == [f"quantize_{forward}", "fp8_gemm_nt"]
    with CountOps() as ops:
        out.sum().backward()
    assert ops.calls == backward
    with CountOps() as ops, torch.no_grad():
        fp8(x)
    assert ops.calls == ["quantize_rows", "fp8_gemm_nt"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_saves_fp8_only(dtype, wgrad, bound, compiled):
    fp8 = BlockwiseFP8Linear(576, 256, bias=False, wgrad=wgrad)
    if bound:
        bind(fp8, dtype)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(200, 576, dtype=dtype, requires_grad=True)
    run = torch.compile(fp8, fullgraph=True) if compiled else fp8
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(x)
    wide = [t for t in saved if t.dtype != torch.float8_e4m3fn]
    assert all(t.dtype == torch.float32 for t in wide)  # scales
    scale_numel = 2 * 5 + (200 * 5 if wgrad == "bf16" else 576 * 2)
    assert sum(t.numel() for t in wide) == scale_numel
    codes = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert sum(t.numel() for t in codes) == 200 * 576 + 256 * 576
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("wgrad", WGRADS)
def test_frozen_weight_saves_no_activations(wgrad):
    fp8 = BlockwiseFP8Linear(300, 200, wgrad=wgrad, bias=False).requires_grad_(False)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        fp8(torch.randn(50, 300, requires_grad=True))
    assert sorted(t.numel() for t in saved) == [2 * 3, 200 * 300]


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("bound", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(bound, wgrad):
    fp8 = BlockwiseFP8Linear(300, 200, bias=False, wgrad=wgrad)
    gradients = bind(fp8, torch.float32) if bound else None
    results = []

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(fp8, x, use_reentrant=False)

    for run in (fp8, checkpointed, torch.compile(checkpointed, fullgraph=True)):
        fp8.zero_grad()
        x = torch.ones(20, 300).cumsum(0).sin().requires_grad_()
        run(x).square().sum().backward()
        results.append((x.grad, gradients.pop() if bound else fp8.weight.grad))
        assert not gradients
    for plain, again, compiled in zip(*results, strict=True):
        assert torch.equal(plain, again) and torch.equal(plain, compiled)


# torch.compile


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, **config):
        super().__init__()
        self.up = BlockwiseFP8Linear(dim, hidden, bias=False, **config)
        self.down = BlockwiseFP8Linear(hidden, dim, bias=False, **config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_equals_eager_to_the_bit(dtype, wgrad, bound):
    """Tiny gradients too: an FP8 leaf's would be rounded through e4m3 and become zero."""
    fp8 = BlockwiseFP8Linear(300, 200, bias=False, wgrad=wgrad)
    gradients = bind(fp8, dtype) if bound else []
    compiled = torch.compile(fp8, fullgraph=True)
    dequantized = dequantize_blockwise(*quantize_blockwise(fp8.weight.detach()))
    x, dy = torch.randn(2, 35, 300), torch.randn(2, 35, 200)
    for magnitude in (1.0, 1e-4, 1e-8, 1e-20):
        results = []
        for run in (fp8, compiled):
            leaf = x.to(dtype, copy=True).requires_grad_()
            out = run(leaf)
            out.backward((dy * magnitude).to(dtype))
            if not bound:
                gradients.append(fp8.weight.grad)
                fp8.weight.grad = None
            results.append((out, leaf.grad, gradients.pop()))
            assert not gradients  # the hook fired once
        for eager, traced in zip(*results, strict=True):
            assert eager.dtype == traced.dtype and torch.equal(eager, traced)
        _, dx, dw = results[1]
        exact = dy.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
        assert sqnr(exact, dw.double() / magnitude) >= 27
        assert sqnr(dy @ dequantized, dx.double() / magnitude) >= 27


@pytest.mark.parametrize("wgrad", WGRADS)
def test_twelve_layers_and_refreshed_weights_do_not_recompile(wgrad):
    model = nn.Sequential(*(Block(128, 200, wgrad=wgrad) for _ in range(12)))
    linears = [m for m in model.modules() if isinstance(m, BlockwiseFP8Linear)]
    gradients = [bind(linear, torch.float32) for linear in linears]
    eager = copy.deepcopy(model)
    for block in model:
        block.compile(fullgraph=True)
    x = torch.randn(40, 128)
    for step in range(5):
        guard = torch._dynamo.config.patch(error_on_recompile=True) if step >= 2 else nullcontext()
        with guard:
            out = model(x)
            out.square().mean().backward()
        torch.testing.assert_close(out, eager(x))
        for linear, twin, gradient in zip(
            linears,
            (m for m in eager.modules() if isinstance(m, BlockwiseFP8Linear)),
            gradients,
            strict=True,
        ):
            weight = linear._compute_weights["weight"]
            updated = dequantize_blockwise(weight.codes, weight.scale_inv) - gradient.pop()
            codes, scale_inv = quantize_blockwise(updated)
            for target in (weight, twin._compute_weights["weight"]):  # in place, as publish does
                target.codes.copy_(codes)
                target.scale_inv.copy_(scale_inv)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


# Construction


def test_from_linear_shares_the_parameters():
    linear = nn.Linear(30, 20).eval()
    fp8 = BlockwiseFP8Linear.from_linear(linear, wgrad="fp8")
    assert fp8.weight is linear.weight and fp8.bias is linear.bias
    assert list(fp8.state_dict()) == ["weight", "bias"] and not fp8.training
    assert BlockwiseFP8Linear.from_linear(nn.Linear(3, 2, bias=False)).bias is None


def test_from_linear_on_meta():
    fp8 = BlockwiseFP8Linear.from_linear(nn.Linear(300, 200, device="meta"))
    out = fp8(torch.empty(5, 300, device="meta"))
    assert out.shape == (5, 200) and out.device.type == "meta"
    fp8.to_empty(device="cpu").reset_parameters()
    assert fp8(torch.randn(5, 300)).isfinite().all()


@pytest.mark.parametrize(
    "config", [{"scale_format": "fp16"}, {"wgrad": "fp32"}, {"backend": "cublas"}]
)
def test_invalid_config_is_named(config):
    ((name, value),) = config.items()
    with pytest.raises(ValueError, match=f"{name} must be one of .*got '{value}'"):
        BlockwiseFP8Linear(4, 4, **config)
    with pytest.raises(ValueError, match=name):
        BlockwiseFP8Linear.from_linear(nn.Linear(4, 4), **config)


def test_repr_shows_the_config():
    fp8 = BlockwiseFP8Linear(4, 8, bias=False, scale_format="ue8m0", wgrad="fp8")
    assert repr(fp8) == (
        "BlockwiseFP8Linear(in_features=4, out_features=8, bias=False, "
        "scale_format=ue8m0, wgrad=fp8, backend=auto)"
    )


def test_initial_weights_are_those_of_nn_linear():
    torch.manual_seed(1)
    linear = nn.Linear(30, 20)
    torch.manual_seed(1)
    fp8 = BlockwiseFP8Linear(30, 20)
    assert torch.equal(fp8.weight, linear.weight) and torch.equal(fp8.bias, linear.bias)
