"""`BlockwiseFP8GroupedExperts` against a loop over experts and against TorchTitan's module."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F

from titan_fp8zero.blocks import quantize_blockwise
from titan_fp8zero.compute_weight import FP8Weight, gradient_carrier
from titan_fp8zero.expert_tokens import pad_tokens, place_tokens, unpad_tokens
from titan_fp8zero.experts import BlockwiseFP8GroupedExperts
from titan_fp8zero.linear import BlockwiseFP8Linear

moe = pytest.importorskip("torchtitan.models.moe.moe")

DTYPES = (torch.float32, torch.bfloat16)
WGRADS = ("bf16", "fp8")
DIM, HIDDEN, TOKENS = 200, 300, 410
COUNTS = [[130, 0, 257, 13], [0, 0, 0, 0], [0, 410, 0, 0], [8, 16, 24, 32]]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def stock_experts(init_std: float = 0.02) -> torch.nn.Module:
    experts = moe.GroupedExperts(DIM, HIDDEN, 4, use_grouped_mm=False)
    with torch.no_grad():
        experts.init_weights(init_std)
    return experts


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    exact, actual = exact.double(), actual.double()
    return 10 * torch.log10(exact.square().sum() / (exact - actual).square().sum()).item()


def bind(experts: BlockwiseFP8GroupedExperts, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    for name in experts.fp8_weights:
        weight = getattr(experts, name).detach()
        codes, scale_inv = quantize_blockwise(weight, experts.config.scale_format)
        carrier = gradient_carrier(weight.shape, dtype, weight.device)
        experts._compute_weights[name] = FP8Weight(codes, scale_inv, carrier)
    return {name: weight.carrier for name, weight in experts._compute_weights.items()}


def per_expert_linears(experts: BlockwiseFP8GroupedExperts, name: str) -> list[torch.nn.Module]:
    linears = []
    for weight in getattr(experts, name).detach():
        linear = BlockwiseFP8Linear(*weight.t().shape, bias=False, **experts.config._asdict())
        linear.weight = torch.nn.Parameter(weight.clone())
        linears.append(linear)
    return linears


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_a_loop_over_linears_to_the_bit(dtype, wgrad, scale_format, counts):
    experts = BlockwiseFP8GroupedExperts.from_experts(
        stock_experts(), wgrad=wgrad, scale_format=scale_format
    )
    x = torch.randn(TOKENS, DIM).to(dtype).requires_grad_()
    dy = torch.randn(TOKENS, DIM).to(dtype)
    out = experts(x, torch.tensor(counts))
    out.backward(dy)
    assert out.shape == x.shape and out.dtype == dtype

    linears = {name: per_expert_linears(experts, name) for name in experts.fp8_weights}

    def loop(name: str, rows: torch.Tensor) -> torch.Tensor:
        parts = rows[: sum(counts)].split(counts)
        outs = [linear(part) for linear, part in zip(linears[name], parts, strict=True)]
        return F.pad(torch.cat(outs), (0, 0, 0, TOKENS - sum(counts)))

    loop_x = x.detach().clone().requires_grad_()
    # SwiGLU on padded rows: the last bit of a CPU's silu depends on an element's position.
    tokens = place_tokens(torch.tensor(counts), TOKENS)
    gate, up = (pad_tokens(loop(name, loop_x), tokens) for name in ("w1", "w3"))
    expected = loop("w2", unpad_tokens(F.silu(gate) * up, tokens))
    expected.backward(dy)
    assert torch.equal(out, expected) and torch.equal(x.grad, loop_x.grad)
    for name in experts.fp8_weights:
        gradient = getattr(experts, name).grad
        for e, count in enumerate(counts):
            assert torch.equal(gradient[e], linears[name][e].weight.grad)
            assert gradient[e].any() == (count > 0)
    assert not out[sum(counts) :].any() and not x.grad[sum(counts) :].any()


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sqnr_against_torchtitan_in_fp32(dtype, wgrad):
    stock = stock_experts()
    experts = BlockwiseFP8GroupedExperts.from_experts(copy.deepcopy(stock), wgrad=wgrad)
    counts = torch.tensor([130, 0, 257, 13])
    x, dy = torch.randn(TOKENS, DIM), torch.randn(TOKENS, DIM)
    exact_x, fp8_x = x.clone().requires_grad_(), x.to(dtype, copy=True).requires_grad_()
    exact, out = stock(exact_x, counts), experts(fp8_x, counts)
    exact.backward(dy)
    out.backward(dy.to(dtype))
    # Three products in a row: their noise adds up, 27 dB each.
    assert sqnr(exact, out) >= 22
    assert sqnr(exact_x.grad, fp8_x.grad) >= 22
    for exact_weight, weight in zip(stock.parameters(), experts.parameters(), strict=True):
        assert sqnr(exact_weight.grad, weight.grad) >= 22


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_equals_unbound(dtype, wgrad):
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts(), wgrad=wgrad)
    x, dy = torch.randn(TOKENS, DIM).to(dtype), torch.randn(TOKENS, DIM).to(dtype)
    counts = torch.tensor([130, 0, 257, 13])
    unbound = experts(x, counts)
    unbound.backward(dy)
    expected = {name: getattr(experts, name).grad.to(dtype) for name in experts.fp8_weights}
    carriers = bind(experts, dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.fill_(float("nan"))
    out = experts(x, counts)
    out.backward(dy)
    assert torch.equal(out, unbound)
    for name, carrier in carriers.items():
        assert carrier.grad.dtype == dtype and torch.equal(carrier.grad, expected[name])


def test_no_tokens_at_all():
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts())
    x = torch.randn(0, DIM, requires_grad=True)
    out = experts(x, torch.tensor([0, 0, 0, 0]))
    out.sum().backward()
    assert out.shape == x.grad.shape == (0, DIM)
    assert not experts.w1.grad.any() and experts.w1.grad.shape == experts.w1.shape


@pytest.mark.parametrize("wgrad", WGRADS)
def test_x_is_quantized_once_and_saved_in_fp8(wgrad):
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts(), wgrad=wgrad)
    bind(experts, torch.float32)
    saved: dict[int, torch.Tensor] = {}
    counts = torch.tensor([130, 0, 257, 13])

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    x = torch.randn(TOKENS, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x, counts)
    codes = [t for t in saved.values() if t.dtype == torch.float8_e4m3fn]
    # Each weight, x once for w1 and w3, and the hidden activations for w2.
    weights, rows = 3 * 4 * HIDDEN * DIM, place_tokens(counts, TOKENS).num_rows
    assert sum(t.numel() for t in codes) == weights + rows * DIM + rows * HIDDEN
    wide = [t for t in saved.values() if t.is_floating_point() and t.element_size() > 1]
    # SwiGLU's own: w1's and w3's outputs and silu; else scales.
    assert sum(t.numel() for t in wide if t.numel() >= rows * HIDDEN) == 3 * rows * HIDDEN
    assert all(t.numel() < 10_000 for t in wide if t.numel() < rows * HIDDEN)


def test_a_bad_token_is_visible_and_stays_in_its_expert():
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts())
    x = torch.randn(TOKENS, DIM)
    x[140, 7] = float("nan")
    out = experts(x, torch.tensor([130, 0, 257, 13]))
    out.sum().backward()
    assert out[140].isnan().all()
    assert out[:140].isfinite().all() and out[141:].isfinite().all()
    assert experts.w1.grad[2].isnan().any()
    assert experts.w1.grad[[0, 1, 3]].isfinite().all()


def test_autocast_returns_the_dtype_of_x():
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts())
    x, counts = torch.randn(TOKENS, DIM), torch.tensor([130, 0, 257, 13])
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(x, counts)
    assert out.dtype == torch.float32
    assert torch.equal(out, experts(x.bfloat16(), counts).float())


@pytest.mark.parametrize("wgrad", WGRADS)
def test_compiled_with_changing_token_counts(wgrad):
    torch._dynamo.reset()
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts(), wgrad=wgrad)
    compiled = torch.compile(experts)
    for counts in ([130, 0, 257, 13], [5, 6, 7, 8], [400, 0, 0, 0]):
        results = []
        x = torch.randn(sum(counts) + 8, DIM)
        for run in (experts, compiled):
            experts.zero_grad()
            leaf = x.clone().requires_grad_()
            out = run(leaf, torch.tensor(counts))
            out.square().sum().backward()
            results.append((out, leaf.grad, *(p.grad for p in experts.parameters())))
        for eager, traced in zip(*results, strict=True):
            # Inductor rounds SwiGLU otherwise, which can move a code by one step.
            assert sqnr(eager, traced) > 40
    torch._dynamo.reset()


@pytest.mark.parametrize("init_std", [0.02, 0.005])
def test_initial_weights_equal_torchtitans_to_the_bit(init_std):
    with torch.device("meta"):
        stock = moe.GroupedExperts(DIM, HIDDEN, 4, use_grouped_mm=True)
    experts = BlockwiseFP8GroupedExperts.from_experts(stock).to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        experts.init_weights(init_std)
    torch.manual_seed(3)
    for ours, theirs in zip(
        experts.parameters(), stock_experts(init_std).parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_copy_initializes_itself():
    experts = BlockwiseFP8GroupedExperts.from_experts(stock_experts())
    before = experts.w1.detach().clone()
    twin = copy.deepcopy(experts)
    with torch.no_grad():
        twin.init_weights(0.5)
    assert torch.equal(experts.w1, before) and not torch.equal(twin.w1, before)


def test_from_experts_is_a_drop_in():
    stock = stock_experts().eval()
    experts = BlockwiseFP8GroupedExperts.from_experts(stock, wgrad="fp8")
    assert experts.num_experts == 4 and not experts.training
    assert list(experts.state_dict()) == list(stock.state_dict())
    assert all(getattr(experts, name) is getattr(stock, name) for name in ("w1", "w2", "w3"))
    assert repr(experts) == (
        "BlockwiseFP8GroupedExperts(4 experts, dim=200, hidden_dim=300, "
        "scale_format=fp32, wgrad=fp8, backend=auto)"
    )
    with pytest.raises(ValueError, match="wgrad must be one of"):
        BlockwiseFP8GroupedExperts.from_experts(stock, wgrad="fp16")


def test_expert_parallel_weights_multiply_their_local_part():
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    local = BlockwiseFP8GroupedExperts.from_experts(stock_experts())
    x, counts = torch.randn(TOKENS, DIM), torch.tensor([130, 0, 257, 13])
    expected = local(x, counts)
    expected.sum().backward()
    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        sharded = copy.deepcopy(local)
        for name in sharded.fp8_weights:
            weight = DTensor.from_local(getattr(local, name).detach(), mesh, [Shard(0)])
            sharded.register_parameter(name, torch.nn.Parameter(weight))
        out = sharded(x, counts)
        out.sum().backward()
        assert torch.equal(out, expected)
        for name in sharded.fp8_weights:
            gradient = getattr(sharded, name).grad
            assert gradient.placements == (Shard(0),) and gradient.shape[0] == 8
            assert torch.equal(gradient.to_local(), getattr(local, name).grad)
    finally:
        destroy_process_group()
