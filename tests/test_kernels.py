"""Triton kernels against their definition in `blocks.py`: on a GPU, or else interpreted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_interpreter
from test_blocks import log_uniform, random_bits

from titan_fp8zero import blocks, gemm
from titan_fp8zero.blocks import BLOCK, fold, num_tiles, scale_shape, unfold
from titan_fp8zero.expert_tokens import pad_tokens, place_tokens
from titan_fp8zero.kernels.activation import (
    launch_quantize_columns,
    launch_quantize_rows,
    launch_quantize_rows_and_columns,
)
from titan_fp8zero.kernels.dequantize import launch_dequantize_rows
from titan_fp8zero.kernels.fold import fold_add, launch_fold_add
from titan_fp8zero.kernels.quantize import launch_quantize_tiles, quantize_tiles
from titan_fp8zero.kernels.transpose import launch_transpose
from titan_fp8zero.kernels.unfold import (
    Destinations,
    launch_unfold_tiles,
    make_destinations,
    unfold_tiles,
)
from titan_fp8zero.kernels.update import launch_update_tiles, update_tiles
from titan_fp8zero.operands import whole_rows

E4M3 = torch.float8_e4m3fn
FORMATS = ("fp32", "ue8m0")
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(128, 128), (192, 256), (300, 303), (2, 130, 256), (1, 1)]
LARGE_SHAPES = [(576, 7168), (4, 1408, 2048)]
AMAX = [3e38, 1.0, 1e-30, 1e-38, 9e-43, 3e-43, 0.0, float("nan"), float("inf")]
BETAS, EPS = (0.9, 0.95), 1e-8
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
shapes = pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=needs_gpu) for shape in LARGE_SHAPES)]
)


@pytest.fixture
def device(monkeypatch) -> str:
    """Where launches run: the GPU, or the CPU under an interpreter that rounds as a GPU does."""
    if torch.cuda.is_available():
        return "cuda"
    triton_interpreter.fix(monkeypatch)
    return "cpu"


# Overflow and 0 * inf are meant: what comes of them is compared.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def data(shape: tuple[int, ...], kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    return log_uniform(shape, seed, -60, 20)


def extreme_tiles() -> torch.Tensor:
    """A tile for each amax, both signs and zeros, and every 1x128 and 128x1 group with it."""
    ramp = torch.linspace(-1, 1, BLOCK * BLOCK, dtype=torch.float64).view(BLOCK, BLOCK)
    tiles = []
    for amax in AMAX:
        tile = (ramp * (amax if 0 < amax < 1e39 else 1)).float() if amax else torch.zeros_like(ramp)
        tile[:, 3] = tile[5, :] = amax
        tile[:, 7] = -0.0
        tiles.append(tile.float())
    return torch.stack(tiles)


def assert_same_codes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit; a NaN may have either sign, which hardware differs in."""
    assert actual.dtype == expected.dtype == E4M3 and actual.shape == expected.shape
    bytes_of = [codes.contiguous().view(torch.uint8).cpu() for codes in (actual, expected)]
    actual, expected = (torch.where(codes & 0x7F == 0x7F, 0x7F, codes) for codes in bytes_of)
    assert torch.equal(actual, expected)


def assert_same_values(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit, zeros' signs included, NaNs' payloads not."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    actual, expected = (
        torch.nan_to_num(t.float().cpu(), torch.pi, torch.inf, -torch.inf)
        for t in (actual, expected)
    )
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def assert_same(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert_same_codes(actual[0], expected[0])
    assert_same_values(actual[1], expected[1])


# Fold


@shapes
@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("tiles_dtype", DTYPES)
@pytest.mark.parametrize("is_first", [False, True])
def test_fold_add_equals_its_definition(shape, is_first, tiles_dtype, gradient_dtype, device):
    """Over ranks that lie apart, from a unit in the middle of a rank; onto NaNs the first time."""
    gradient = data(shape, "normal").to(gradient_dtype).to(device)
    gradient.view(-1)[0] = -0.0
    units_per_rank = num_tiles(shape) // 3 + 1
    start = units_per_rank - 1
    row = torch.randn(5, (units_per_rank + 1) * blocks.TILE_NUMEL + 16).to(tiles_dtype)
    row = row * torch.nan if is_first else row
    rows = [row.clone().to(device) for _ in range(2)]
    launched, expected = (
        r[:, blocks.TILE_NUMEL : -16].view(5, units_per_rank, BLOCK, BLOCK) for r in rows
    )
    launch_fold_add(launched, gradient, start, is_first)
    blocks.fold_add(expected, gradient, start, is_first)
    assert_same_values(*rows)
    mine = slice(start, start + num_tiles(shape))
    before, after = (
        r.cpu()[:, blocks.TILE_NUMEL : -16].reshape(-1, BLOCK, BLOCK)[mine] for r in (row, rows[0])
    )
    before = torch.zeros_like(before) if is_first else before
    total = (before.float() + fold(gradient.cpu().float())).to(tiles_dtype)
    assert_same_values(after, total)


@pytest.mark.parametrize("shape", [(130, 200), (2, 130, 200)])
def test_fold_add_of_strided_gradients(shape, device):
    gradients = [
        torch.randn(*shape[:-2], *reversed(shape[-2:]), device=device).transpose(-2, -1),
        torch.ones((), device=device).expand(shape),
        torch.randn(*shape[:-1], 2 * shape[-1], device=device)[..., ::2],
    ]
    for gradient in gradients:
        tiles = torch.zeros(2, num_tiles(shape), BLOCK, BLOCK, device=device)
        launch_fold_add(tiles, gradient, 1)
        assert torch.equal(tiles.view(-1, BLOCK, BLOCK)[1 : 1 + num_tiles(shape)], fold(gradient))
        assert not tiles[0, 0].any() and not tiles[1, 1:].any()


# Quantize


@pytest.mark.parametrize("round_main_to_bf16", [False, True])
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "log_uniform", "extreme"])
def test_quantize_tiles_equals_its_definition(kind, scale_format, round_main_to_bf16, device):
    main = extreme_tiles() if kind == "extreme" else data((4, BLOCK, BLOCK), kind)
    rounded = main.bfloat16().float() if round_main_to_bf16 else main
    expected = blocks.quantize_tiles(rounded, scale_format)
    codes, scale_inv = empty_payload(len(main), device)
    launch_quantize_tiles(main.to(device), codes, scale_inv, scale_format, round_main_to_bf16)
    assert_same((codes, scale_inv), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("exponent", [-149, -127, -100, -61, -51, 0, 60, 118])
def test_quotients_of_many_magnitudes_are_rounded_correctly(exponent, scale_format):
    main = torch.randn(2048, BLOCK, BLOCK, device="cuda").clamp(-8, 8) * 2.0**exponent
    codes, scale_inv = empty_payload(len(main), "cuda")
    launch_quantize_tiles(main, codes, scale_inv, scale_format, False)
    assert_same((codes, scale_inv), blocks.quantize_tiles(main, scale_format))


def empty_payload(tiles: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(tiles, BLOCK, BLOCK, dtype=torch.uint8, device=device).view(E4M3)
    return codes, torch.zeros(tiles, device=device)


# Update


class Tiles:
    """A main parameter's tiles, its gradient, moments and payload, at some step of training."""

    def __init__(self, tiles: int, device: str, moment_dtype: torch.dtype = torch.float32) -> None:
        shape = (tiles, BLOCK, BLOCK)
        self.main = data(shape, "normal", 1).to(device)
        self.gradient = data(shape, "log_uniform", 2).to(device)
        self.exp_avg = data(shape, "normal", 3).to(device, moment_dtype)
        self.exp_avg_sq = data(shape, "normal", 4).square().to(device, moment_dtype)
        self.codes, self.scale_inv = empty_payload(tiles, device)
        self.hyperparameters = hyperparameters(device).repeat(tiles, 1)

    @property
    def updated(self) -> tuple[torch.Tensor, ...]:
        return self.main, self.exp_avg, self.exp_avg_sq

    def update(self, update: Any, scale_format: str = "fp32", rounds: bool = False) -> None:
        main, *moments = self.updated
        payload = (self.codes, self.scale_inv)
        inputs = (main, self.gradient, *moments, *payload, self.hyperparameters)
        update(*inputs, *BETAS, EPS, scale_format, rounds)


def hyperparameters(device: str, lr: float = 3e-2, step: int = 3, clip: float = 0.5):
    beta1, beta2 = BETAS
    return torch.tensor(
        [1 - lr * 0.1, lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, clip],
        device=device,
    )


@pytest.mark.parametrize("tiles", [2, pytest.param(512, marks=needs_gpu)])
@pytest.mark.parametrize(
    "update", [launch_update_tiles, blocks.update_tiles], ids=["kernel", "definition"]
)
@pytest.mark.parametrize("moment_dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_update_equals_adamw_in_fp64(gradient_dtype, moment_dtype, update, tiles, device):
    given = Tiles(tiles, device, moment_dtype)
    given.gradient = given.gradient.to(gradient_dtype)
    main, exp_avg, exp_avg_sq = (t.double() for t in given.updated)
    given.hyperparameters[-1] = hyperparameters(device, lr=1e-3, step=9, clip=2.0)
    decay, step_size, correction, clip_factor = (
        column[:, None, None] for column in given.hyperparameters.double().unbind(1)
    )
    gradient = given.gradient.double() * clip_factor
    m = BETAS[0] * exp_avg + (1 - BETAS[0]) * gradient
    v = BETAS[1] * exp_avg_sq + (1 - BETAS[1]) * gradient**2
    change = step_size * m / (v.sqrt() * correction + EPS)
    if update is launch_update_tiles:
        given.update(launch_update_tiles)
    else:
        blocks.update_tiles(
            given.main, given.gradient, *given.updated[1:], given.hyperparameters, BETAS, EPS
        )
    # fp32 roundings: the gradient's product, a difference, a product and a sum for m, where terms
    # cancel; positive terms only for v; the quotient, with its fast division, adds up to 8 more.
    ulp = 2.0**-23
    m_error = 2 * ulp * (exp_avg.abs() + gradient.abs())
    errors = [
        ulp * main.abs() + change.abs() * 8 * ulp + m_error * (change / m).abs().nan_to_num(),
        m_error,
        4 * ulp * v,
    ]
    stored = 2.0**-8 if moment_dtype == torch.bfloat16 else 0  # moments are rounded once more
    expected = main * decay - change, m, v
    for actual, exact, error, rounding in zip(
        given.updated, expected, errors, (0, stored, stored), strict=True
    ):
        assert ((actual.double() - exact).abs() <= error + exact.abs() * rounding + 1e-45).all()
    assert not torch.equal(given.main.double(), main)


@pytest.mark.parametrize("round_main_to_bf16", [False, True])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_update_quantizes_what_it_wrote(scale_format, round_main_to_bf16, device):
    given = Tiles(3, device)
    given.update(launch_update_tiles, scale_format, round_main_to_bf16)
    rounded = given.main.bfloat16().float() if round_main_to_bf16 else given.main
    expected = blocks.quantize_tiles(rounded.cpu(), scale_format)
    assert_same((given.codes, given.scale_inv), expected)


def test_update_without_step_or_decay_quantizes_extreme_tiles(device):
    given = Tiles(len(AMAX), device)
    given.main = extreme_tiles().to(device)
    given.hyperparameters[:] = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device)
    given.update(launch_update_tiles)
    torch.testing.assert_close(given.main.cpu(), extreme_tiles(), rtol=0, atol=0, equal_nan=True)
    assert_same((given.codes, given.scale_inv), blocks.quantize_tiles(given.main.cpu()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_update_replayed_from_a_cuda_graph_equals_eager():
    """The learning rate, the bias corrections and the clip factor change between replays."""
    eager, replayed = Tiles(64, "cuda"), Tiles(64, "cuda")
    given = [t.clone() for t in replayed.updated]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed.update(update_tiles)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.update(update_tiles)
    torch._foreach_copy_(list(replayed.updated), given)
    for step in range(1, 11):
        now = hyperparameters("cuda", lr=1e-2 / step, step=step, clip=1 / step)
        gradient = data((64, BLOCK, BLOCK), "normal", step).cuda()
        for tiles in (eager, replayed):
            tiles.hyperparameters.copy_(now)
            tiles.gradient.copy_(gradient)
        eager.update(update_tiles)
        graph.replay()
        assert all(map(torch.equal, eager.updated, replayed.updated))
        assert_same((replayed.codes, replayed.scale_inv), (eager.codes, eager.scale_inv))


# Unfold


def unfold_all(
    unfold_into: Any, shapes: list[tuple[int, ...]], has_transposed: bool, device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor], Destinations]:
    """Tiles and scales of weights of these shapes, shuffled over three ranks with gaps, and where
    they went."""
    units_per_rank = sum(map(num_tiles, shapes)) // 3 + 2
    row = -(-units_per_rank * (blocks.TILE_NUMEL + 4) // 16) * 16
    payload = random_bits((3, row), torch.uint8, 0).to(device)
    codes = payload[:, : units_per_rank * blocks.TILE_NUMEL]
    scale_inv = payload[:, units_per_rank * blocks.TILE_NUMEL :][:, : 4 * units_per_rank]
    codes = codes.view(E4M3).view(3, units_per_rank, BLOCK, BLOCK)
    scale_inv = scale_inv.view(torch.float32)
    order = torch.randperm(3 * units_per_rank, generator=torch.Generator().manual_seed(0))
    units = order[: sum(map(num_tiles, shapes))].split([num_tiles(shape) for shape in shapes])

    def zeros(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)

    destinations = make_destinations(
        units,
        [zeros(shape) for shape in shapes],
        [torch.zeros(scale_shape(shape), device=device) for shape in shapes],
        [zeros((*shape[:-2], shape[-1], shape[-2])) for shape in shapes if has_transposed],
    )
    unfold_into(codes, scale_inv, *destinations)
    data = codes.cpu().reshape(-1, BLOCK, BLOCK).view(torch.uint8)
    tiles = [data[mine].view(E4M3) for mine in units]
    return tiles, [scale_inv.cpu().flatten()[mine] for mine in units], destinations


@pytest.mark.parametrize("unfold_into", [launch_unfold_tiles, unfold_tiles], ids=["kernel", "op"])
@pytest.mark.parametrize("has_transposed", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        [(256, 128), (2, 144, 272), (16, 16)],
        [(300, 303), (2, 130, 7), (1, 1)],
        pytest.param([(576, 7168), (4, 1408, 2048), (128, 128)], marks=needs_gpu),
    ],
    ids=["aligned", "odd", "large"],
)
def test_unfold_writes_weights_scales_and_transposes(shapes, has_transposed, unfold_into, device):
    tiles, scales, destinations = unfold_all(unfold_into, shapes, has_transposed, device)
    for index, shape in enumerate(shapes):
        expected = unfold(tiles[index].view(torch.uint8), shape)
        assert torch.equal(destinations.codes[index].view(torch.uint8).cpu(), expected)
        given = scales[index].view(scale_shape(shape)).view(torch.int32)
        assert torch.equal(destinations.scale_inv[index].cpu().view(torch.int32), given)
        if has_transposed:
            copy = destinations.transposed[index].view(torch.uint8).cpu()
            assert torch.equal(copy, expected.transpose(-2, -1))


def test_unfold_refuses_weights_it_cannot_address():
    units, codes, scale = torch.arange(6), torch.zeros(200, 300).to(E4M3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        make_destinations([units], [codes.t()], [scale])
    long = torch.empty(1, 1 << 23, dtype=E4M3)
    with pytest.raises(ValueError, match="too long"):
        make_destinations([torch.arange(1 << 16)], [long], [torch.ones(1, 1 << 16)])


# Activations

ACTIVATIONS = [(128, 128), (130, 384), (300, 303), (1, 1), (0, 128), (64, 0)]
LARGE_ACTIVATIONS = [pytest.param(s, marks=needs_gpu) for s in [(8192, 4096), (8190, 7168)]]


def define(x: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, ...]:
    return *blocks.quantize_rows(x, scale_format), *blocks.quantize_rows(x.t(), scale_format)


def assert_rows_and_columns(
    x: torch.Tensor, scale_format: str, expected: tuple[torch.Tensor, ...]
) -> None:
    """Quantized apart and in one pass."""
    rows = launch_quantize_rows(x, scale_format)
    columns = launch_quantize_columns(x, scale_format)
    both = launch_quantize_rows_and_columns(x, scale_format)
    for actual in (rows, both[:2]):
        assert_same(actual, expected[:2])
    for actual in (columns, both[2:]):
        assert_same(actual, expected[2:])


@pytest.mark.parametrize("shape", [*ACTIVATIONS, *LARGE_ACTIVATIONS])
@pytest.mark.parametrize(
    ("dtype", "scale_format", "kind"),
    [
        (torch.float32, "fp32", "log_uniform"),
        (torch.bfloat16, "fp32", "normal"),
        (torch.bfloat16, "ue8m0", "log_uniform"),
    ],
)
def test_quantizing_activations_equals_the_definition(dtype, scale_format, kind, shape, device):
    x = data(shape, kind).to(device, dtype)
    assert_rows_and_columns(x, scale_format, define(x, scale_format))


def test_quantizing_strided_activations(device):
    x = data((200, 300), "normal").to(device)
    for view in (x.t(), x[:, ::3], x[:1].expand(130, 300)):
        assert_rows_and_columns(view, "fp32", define(view, "fp32"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_format", FORMATS)
def test_extreme_activations(scale_format, dtype, device):
    x = extreme_tiles().view(-1, BLOCK).to(dtype)
    assert_rows_and_columns(x.to(device), scale_format, define(x, scale_format))


@pytest.mark.parametrize(
    "counts",
    [[130, 0, 257, 13], [0, 0, 0, 0], [0, 400, 0, 0], [1, 1, 1, 1], [128, 128, 128, 26], [410]],
)
def test_quantizing_columns_of_experts_equals_the_definition(counts, device):
    x = data((410, 72), "log_uniform")
    tokens = place_tokens(torch.tensor(counts), len(x))
    x, ends = pad_tokens(x, tokens), tokens.ends
    expected = gemm.quantize_rows_and_columns(x, "fp32", ends)
    actual = launch_quantize_rows_and_columns(x.to(device), "fp32", ends.to(device))
    columns = launch_quantize_columns(x.to(device), "fp32", ends.to(device))
    assert_same(actual[:2], expected[:2])
    used = -(-int(ends[-1]) // BLOCK) * BLOCK  # what lies beyond is not written
    for codes, scale_inv in (actual[2:], columns):
        own = (codes[: used * 72], scale_inv[:, : used // BLOCK])
        assert_same(own, (expected[2][: used * 72], expected[3][:, : used // BLOCK]))


def test_codes_of_columns_are_padded_with_zeros(device):
    x = data((37, 5), "normal").to(device)
    for codes in (launch_quantize_columns(x, "fp32")[0], gemm.quantize_columns(x.cpu(), "fp32")[0]):
        whole = whole_rows(codes)
        assert whole.shape == (5, 48) and not whole[:, 37:].float().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="approximates as the GPU does")
def test_reciprocals_of_scales_are_correctly_rounded():
    # Every mantissa at exponents from the smallest scale to the largest: a group each, whose scale
    # is its largest magnitude over 448, and whose code is 448 only if the reciprocal is right.
    mantissas = torch.arange(1 << 23, dtype=torch.int32, device="cuda").view(2, -1, 1)
    for exponent in (10, 127, 128, 253):
        for half in mantissas:
            x = (half + (exponent << 23)).view(torch.float32)
            x = torch.cat([x, x * 0.6161], dim=1)
            assert_same(launch_quantize_rows(x, "fp32"), blocks.quantize_rows(x, "fp32"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*ACTIVATIONS, *LARGE_ACTIVATIONS])
def test_dequantizing_rows_equals_the_definition(shape, dtype, device):
    quantized = gemm.quantize_rows(data(shape, "log_uniform").to(device), "fp32")
    actual = launch_dequantize_rows(*quantized, dtype)
    assert torch.equal(actual, blocks.dequantize_rows(*quantized, dtype))


@pytest.mark.parametrize("shape", [(128, 128), (300, 303), (4, 272, 160), (1, 1), (576, 7168)])
def test_transposing_codes_equals_torch(shape, device):
    codes = data(shape, "normal").to(device).to(E4M3)
    actual = launch_transpose(codes).view(torch.uint8)
    assert torch.equal(actual, codes.view(torch.uint8).transpose(-2, -1).contiguous())


# Ops


def test_ops_have_fakes():
    given = Tiles(2, "cpu")
    main, *moments = given.updated
    payload = (given.codes, given.scale_inv)
    codes, scale_inv = torch.zeros(1, 6, BLOCK, BLOCK).to(E4M3), torch.ones(1, 6)
    weights = (
        [torch.zeros(200, 300).to(E4M3)],
        [torch.zeros(2, 3)],
        [torch.zeros(300, 200).to(E4M3)],
    )
    destinations = make_destinations([torch.arange(6)], *weights)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (fold_add, (torch.zeros(2, 3, BLOCK, BLOCK), torch.randn(200, 300), 0)),
        (quantize_tiles, (main, *payload, "fp32", False)),
        (
            update_tiles,
            (
                main,
                given.gradient,
                *moments,
                *payload,
                given.hyperparameters,
                *BETAS,
                EPS,
                "fp32",
                False,
            ),
        ),
        (unfold_tiles, (codes, scale_inv, *destinations)),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils="test_faketensor")


def test_kernels_compile_for_hopper_and_move_16_bytes_at_a_time():
    """Without a GPU. Narrow loads and stores, or a division an element, would halve the speed."""
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("TRITON_INTERPRET", None)
    script = [sys.executable, str(root / "tests" / "compile_kernels.py")]
    compiled = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    ptx_of = json.loads(compiled.stdout)
    narrow = re.compile(r"(?:ld|st)\.global\.b(?:8|16)")
    assert [name for name, ptx in ptx_of.items() if narrow.search(ptx)] == []
    assert all("global.v4.b32" in ptx for ptx in ptx_of.values())
    assert all(ptx_of[name].count("div.rn") == 1 for name in ("quantize", "update"))


def test_refusals_name_the_argument():
    given = Tiles(2, "cpu")
    with pytest.raises(ValueError, match="scale_format must be one of"):
        given.update(launch_update_tiles, "fp16")
    given.gradient = given.gradient.transpose(1, 2)
    with pytest.raises(ValueError, match="gradient must be contiguous tiles"):
        given.update(launch_update_tiles)
    given.hyperparameters = given.hyperparameters[0]
    with pytest.raises(ValueError, match=r"hyperparameters must be contiguous \[2, 4\]"):
        given.update(launch_update_tiles)
    given = Tiles(2, "cpu")
    given.gradient = torch.zeros(3, BLOCK, BLOCK)
    with pytest.raises(ValueError, match="'gradient': 3"):
        given.update(launch_update_tiles)
    with pytest.raises(ValueError, match="rank_tiles must be"):
        launch_fold_add(torch.zeros(2, 3, BLOCK, BLOCK).transpose(2, 3), torch.ones(2, 2), 0)
