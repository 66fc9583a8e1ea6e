"""FP8 GEMMs against fp64 products of the dequantized operands, and the ops' contracts."""

import importlib.util
import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_fp8zero import gemm
from titan_fp8zero.backends import choose_backend
from titan_fp8zero.blocks import (
    BLOCK,
    dequantize_blockwise,
    dequantize_rows,
    expand_scale,
    quantize_blockwise,
    quantize_rows,
    scale_shape,
)
from titan_fp8zero.expert_tokens import ExpertTokens, pad_tokens, place_tokens, unpad_tokens
from titan_fp8zero.kernels.dequantize import dequantize_rows as dequantize_rows_op
from titan_fp8zero.operands import expert_rows

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(64, 256, 128), (37, 300, 200), (1, 1, 1), (130, 129, 127), (5, 576, 256), (0, 256, 128)]
COUNTS = [[130, 0, 257, 13], [0, 0, 0, 0], [0, 400, 0, 0], [1, 1, 1, 1], [100, 100, 100, 100]]
is_sm90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
requires_sm90 = pytest.mark.skipif(not is_sm90, reason="FP8 blocks need SM90")
FAST_BACKENDS = ["torch", *(["deep_gemm"] if importlib.util.find_spec("deep_gemm") else [])]
fast = settings(max_examples=25, deadline=None)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def close_to(exact: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype):
    """Within fp32 summation error, relative to the sum of magnitudes, and one final rounding."""
    return exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-23) + terms * 2.0**-18


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype):
    """`out` is `a @ b.T`."""
    a, b = a.double(), b.double()
    exact = a @ b.t()
    assert out.dtype == dtype and out.shape == exact.shape and out.is_contiguous()
    assert ((out.double() - exact).abs() <= close_to(exact, a.abs() @ b.t().abs(), dtype)).all()


# Backends


def test_cpu_gets_the_reference_and_logs_it_once(caplog):
    choose_backend.cache_clear()
    with caplog.at_level(logging.INFO, "titan_fp8zero"):
        for _ in range(3):
            assert choose_backend(torch.device("cpu")) == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "FP8 GEMM backend on cpu: reference"
    ]


def test_backend_that_cannot_run_is_refused_with_the_reason():
    with pytest.raises(RuntimeError, match=r"SM90 .* on cpu: use backend 'reference' or 'auto'"):
        choose_backend(torch.device("cpu"), "torch")
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cublas'"):
        choose_backend(torch.device("cpu"), "cublas")
    operands = (*quantize_rows(torch.ones(2, 3)), *quantize_blockwise(torch.ones(4, 3)))
    with pytest.raises(RuntimeError, match="SM90"):
        gemm.fp8_gemm_nt(*operands, torch.float32, "torch")


# Dense


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gemm_is_the_product_of_the_dequantized(shape, dtype):
    m, k, n = shape
    x, w = quantize_rows(torch.randn(m, k)), quantize_blockwise(torch.randn(n, k))
    out = gemm.fp8_gemm_nt(*x, *w, dtype, "reference")
    assert_product(out, dequantize_rows(*x), dequantize_blockwise(*w), dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_dgrad_takes_the_transposed_weight(shape):
    m, k, n = shape
    dy, w = quantize_rows(torch.randn(m, n)), quantize_blockwise(torch.randn(n, k))
    dx = gemm.fp8_gemm_nt(*dy, w[0].t(), w[1].t(), torch.float32, "reference")
    assert_product(dx, dequantize_rows(*dy), dequantize_blockwise(*w).t(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_wgrad(shape, dtype):
    m, k, n = shape
    dy, x = (gemm.quantize_columns(torch.randn(m, size), "fp32") for size in (n, k))
    dw = gemm.fp8_wgrad_nt(*dy, *x, dtype, "reference")
    assert_product(dw, dequantize_rows(*dy), dequantize_rows(*x), dtype)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_wgrad(shape, dtype, out_dtype):
    m, k, n = shape
    dy, x = torch.randn(m, n, dtype=dtype), quantize_rows(torch.randn(m, k))
    dw = gemm.bf16_wgrad_tn(dy, *x, out_dtype, "reference")
    assert_product(dw, dy.t(), dequantize_rows(*x, dtype).t(), out_dtype)


@fast
@given(st.integers(0, 300), st.integers(1, 300), st.sampled_from(["fp32", "ue8m0"]))
def test_columns_are_the_rows_of_the_transposed(m, k, scale_format):
    x = torch.randn(m, k)
    for ours, theirs in zip(
        gemm.quantize_columns(x, scale_format), quantize_rows(x.t(), scale_format), strict=True
    ):
        assert ours.shape == theirs.shape and torch.equal(bits(ours), bits(theirs))


def test_different_inner_sizes_are_refused():
    # 300 and 384 are the same number of groups: padding would hide it.
    operands = (*quantize_rows(torch.ones(2, 300)), *quantize_blockwise(torch.ones(4, 384)))
    with pytest.raises(ValueError, match="x has 300 features, the weight takes 384"):
        gemm.fp8_gemm_nt(*operands, torch.float32, "reference")


def test_autocast_does_not_reach_into_the_reference():
    dy, w = torch.randn(70, 200), torch.randn(300, 200)
    x = quantize_rows(dy)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(
                (
                    gemm.fp8_gemm_nt(*x, *quantize_blockwise(w), torch.float32, "reference"),
                    gemm.bf16_wgrad_tn(dy, *x, torch.float32, "reference"),
                )
            )
    for plain, autocast in zip(*results, strict=True):
        assert torch.equal(plain, autocast)


# Grouped


def quantize_grouped(
    x: torch.Tensor, tokens: ExpertTokens
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Operands of rows and of columns, of tokens end to end."""
    quantized = gemm.quantize_rows_and_columns(pad_tokens(x, tokens), "fp32", tokens.ends)
    return quantized[:2], quantized[2:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_ops_equal_a_loop_over_experts(counts, dtype):
    n, k, num_tokens = 200, 300, 410
    x, dy, w = torch.randn(num_tokens, k), torch.randn(num_tokens, n), torch.randn(4, n, k)
    tokens = place_tokens(torch.tensor(counts), num_tokens)
    (x_rows, x_cols), (dy_rows, dy_cols) = (quantize_grouped(t, tokens) for t in (x, dy))
    w_blocks = quantize_blockwise(w)
    transposed = [t.transpose(-2, -1) for t in w_blocks]
    tail = (dtype, "reference", tokens.ends)
    out = unpad_tokens(gemm.fp8_gemm_nt(*x_rows, *w_blocks, *tail), tokens)
    dx = unpad_tokens(gemm.fp8_gemm_nt(*dy_rows, *transposed, *tail), tokens)
    dw_fp8 = gemm.fp8_wgrad_nt(*dy_cols, *x_cols, *tail)
    dw_bf16 = gemm.bf16_wgrad_tn(pad_tokens(dy.to(dtype), tokens), *x_rows, *tail)

    start = 0
    for e, count in enumerate(counts):
        mine = slice(start, start + count)
        tail = (dtype, "reference")
        x_mine, dy_mine = quantize_rows(x[mine]), quantize_rows(dy[mine])
        expected = gemm.fp8_gemm_nt(*x_mine, w_blocks[0][e], w_blocks[1][e], *tail)
        assert torch.equal(out[mine], expected)
        expected = gemm.fp8_gemm_nt(*dy_mine, transposed[0][e], transposed[1][e], *tail)
        assert torch.equal(dx[mine], expected)
        columns = [gemm.quantize_columns(t[mine], "fp32") for t in (dy, x)]
        assert torch.equal(dw_fp8[e], gemm.fp8_wgrad_nt(*columns[0], *columns[1], *tail))
        expected = gemm.bf16_wgrad_tn(dy[mine].to(dtype), *x_mine, *tail)
        assert torch.equal(dw_bf16[e], expected)
        if count == 0:
            assert not dw_fp8[e].any() and not dw_bf16[e].any()
        start += count
    assert not out[start:].any() and not dx[start:].any()


@fast
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(0, 200))
def test_tokens_of_experts_are_padded_to_blocks_and_back(counts, surplus):
    num_tokens = sum(counts) + surplus
    x = torch.arange(1.0, num_tokens + 1)[:, None].expand(num_tokens, 3)
    tokens = place_tokens(torch.tensor(counts), num_tokens)
    padded = pad_tokens(x, tokens)
    assert len(padded) == tokens.num_rows and tokens.num_rows % BLOCK == 0
    first, used = 0, torch.zeros(tokens.num_rows, dtype=torch.bool)
    for rows, count in zip(expert_rows(tokens.ends, tokens.num_rows), counts, strict=True):
        assert rows.start % BLOCK == 0 and rows.stop - rows.start == count
        assert torch.equal(padded[rows], x[first : first + count])
        used[rows] = True
        first += count
    assert not padded[~used].any()
    padded = padded.masked_fill(~used[:, None], math.nan)
    expected = torch.where(torch.arange(num_tokens)[:, None] < first, x, 0)
    assert torch.equal(unpad_tokens(padded, tokens), expected)


def test_padding_tokens_is_differentiable():
    x = torch.randn(7, 2, dtype=torch.double, requires_grad=True)
    tokens = place_tokens(torch.tensor([3, 0, 2]), 7)
    assert torch.autograd.gradcheck(lambda x: pad_tokens(x, tokens), x)
    padded = torch.randn(tokens.num_rows, 1, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda padded: unpad_tokens(padded, tokens), padded)


def test_wrong_token_counts_are_refused():
    x, w = quantize_rows(torch.ones(8, 16)), quantize_blockwise(torch.ones(2, 4, 16))
    with pytest.raises(ValueError, match="tokens of 3 experts, weights of 2"):
        gemm.fp8_gemm_nt(*x, *w, torch.float32, "reference", torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="experts' tokens end at row 9 of 8"):
        gemm.fp8_gemm_nt(*x, *w, torch.float32, "reference", torch.tensor([4, 9]))


# Ops


@pytest.mark.parametrize("ends", [None, torch.tensor([5, 128, 148], dtype=torch.int32)])
def test_fakes_agree_with_the_ops(ends):
    grouped = ends is not None
    num_tokens = 256 if grouped else 37
    x, dy = torch.randn(num_tokens, 300), torch.randn(num_tokens, 200)
    w = torch.randn(3, 200, 300) if grouped else torch.randn(200, 300)
    rows, weight = gemm.quantize_rows(x, "fp32"), gemm.quantize_weight(w, "fp32")
    columns = [gemm.quantize_columns(t, "fp32", ends) for t in (dy, x)]
    tail = (torch.bfloat16, "reference", ends)
    calls = [
        (gemm.quantize_weight, (w, "fp32")),
        (gemm.quantize_rows, (x, "ue8m0")),
        (gemm.quantize_rows, (torch.randn(256, 37).t(), "fp32")),
        (gemm.quantize_columns, (x, "fp32", ends)),
        (gemm.quantize_rows_and_columns, (x, "fp32", ends)),
        (gemm.fp8_gemm_nt, (*rows, *weight, *tail)),
        (gemm.fp8_wgrad_nt, (*columns[0], *columns[1], *tail)),
        (gemm.bf16_wgrad_tn, (dy, *rows, *tail)),
        (dequantize_rows_op, (*rows, torch.bfloat16)),
    ]
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils="test_faketensor")


def spread(*shape: int) -> torch.Tensor:
    """Magnitudes differ by block, so that a scale in a wrong place shows."""
    grid = torch.randint(-4, 5, scale_shape(shape), device="cuda").float().exp2()
    return torch.randn(*shape, device="cuda") * expand_scale(grid, shape)


def assert_near_the_reference(
    op: Any, operands: tuple[torch.Tensor, ...], dtype: torch.dtype, backend: str, ends: Any = None
) -> None:
    """Within what tensor cores round off fp32 sums, and one rounding to bf16."""
    out = op(*operands, dtype, backend, ends)
    expected = op(*operands, dtype, "reference", ends)
    assert out.dtype == dtype and out.shape == expected.shape and out.is_contiguous()
    if ends is not None and op is gemm.fp8_gemm_nt:  # other rows hold anything
        mine = torch.zeros(len(out), dtype=torch.bool, device="cuda")
        for rows in expert_rows(ends, len(out)):
            mine[rows] = True
        out, expected = out[mine], expected[mine]
    error = (out.double() - expected.double()).norm()
    assert error <= 6e-3 * expected.double().norm(), op


@pytest.mark.gpu
@requires_sm90
@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        (128, 128, 128),
        (256, 512, 384),
        (512, 7168, 576),
        (77, 1536, 300),
        (64, 10944, 512),
    ],
)
def test_dense_equals_the_reference(shape, scale_format, out_dtype, backend):
    m, k, n = shape
    x, dy, w = spread(m, k), spread(m, n), spread(n, k)
    rows, dy_rows = (gemm.quantize_rows(t, scale_format) for t in (x, dy))
    columns = [gemm.quantize_columns(t, scale_format) for t in (dy, x)]
    codes, scale = gemm.quantize_weight(w, scale_format)
    calls = [
        (gemm.fp8_gemm_nt, (*rows, codes, scale)),
        (gemm.fp8_gemm_nt, (*dy_rows, codes.t(), scale.t())),
        (gemm.fp8_gemm_nt, (*dy_rows, codes.t().contiguous(), scale.t())),
        (gemm.fp8_wgrad_nt, (*columns[0], *columns[1])),
        (gemm.bf16_wgrad_tn, (dy.bfloat16(), *rows)),
    ]
    for op, operands in calls:
        assert_near_the_reference(op, operands, out_dtype, backend)


GROUPED = [
    *[(counts, 300, 200) for counts in COUNTS],
    ([130, 0, 257, 13, 100, 1], 576, 768),
    # Shapes with which DeepGEMM's k-grouped kernel hung or went wrong (its #237, #405, #415).
    ([128, 256], 192, 3072),
    ([128, 384, 0, 256, 128, 512], 768, 1536),
    ([384, 256], 1408, 1408),
]


@pytest.mark.gpu
@requires_sm90
@pytest.mark.parametrize("backend", FAST_BACKENDS)
@pytest.mark.parametrize(("counts", "k", "n"), GROUPED)
def test_grouped_equals_the_reference(counts, k, n, backend):
    num_tokens = sum(counts) + 10
    x, dy, w = spread(num_tokens, k), spread(num_tokens, n), spread(len(counts), n, k)
    tokens = place_tokens(torch.tensor(counts, device="cuda"), num_tokens)
    (x_rows, x_cols), (dy_rows, dy_cols) = (quantize_grouped(t, tokens) for t in (x, dy))
    codes, scale = gemm.quantize_weight(w, "fp32")
    calls = [
        (gemm.fp8_gemm_nt, (*x_rows, codes, scale)),
        (gemm.fp8_gemm_nt, (*dy_rows, codes.mT, scale.mT)),
        (gemm.fp8_wgrad_nt, (*dy_cols, *x_cols)),
        (gemm.bf16_wgrad_tn, (pad_tokens(dy.bfloat16(), tokens), *x_rows)),
    ]
    for op, operands in calls:
        for out_dtype in DTYPES:
            assert_near_the_reference(op, operands, out_dtype, backend, tokens.ends)


@pytest.mark.gpu
@requires_sm90
def test_auto_takes_the_fastest_and_keeps_nan_visible():
    assert choose_backend(torch.device("cuda", 0)) == FAST_BACKENDS[-1]
    x, w = torch.randn(64, 300, device="cuda"), torch.randn(200, 300, device="cuda")
    x[3, 290] = float("inf")
    out = gemm.fp8_gemm_nt(
        *gemm.quantize_rows(x, "fp32"), *gemm.quantize_weight(w, "fp32"), torch.bfloat16, "auto"
    )
    assert out[3].isnan().all() and out[:3].isfinite().all() and out[4:].isfinite().all()
