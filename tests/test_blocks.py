"""The numerics' definition: fold and unfold to the bit, quantization against an fp64 reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_fp8zero.blocks import (
    BLOCK,
    SMALLEST_NORMAL,
    block_grid,
    dequantize_blockwise,
    dequantize_rows,
    fold,
    num_tiles,
    quantize_blockwise,
    quantize_rows,
    quantize_tiles,
    scale_shape,
    to_e4m3,
    unfold,
)

FORMATS = ("fp32", "ue8m0")
sizes = st.integers(1, 300)
shapes = st.one_of(st.tuples(sizes, sizes), st.tuples(st.integers(1, 3), sizes, sizes))
seeds = st.integers(0, 2**31)
fast = settings(max_examples=40, deadline=None)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern, NaN and inf too."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def log_uniform(shape: tuple[int, ...], seed: int, low: float = -20, high: float = 20):
    """Magnitudes from 2^low to 2^high: Gaussian blocks hide rounding faults."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(shape, generator=generator) * (high - low) + low
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return sign * exponent.exp2()


def round_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest e4m3 value, ties to even, saturated; in fp64, from the format's definition."""
    magnitude = np.abs(values)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(magnitude)), -6)
    step = np.exp2(exponent - 3)
    return np.sign(values) * np.minimum(np.rint(magnitude / step) * step, 448.0)


def reference_scale(amax: np.float32, scale_format: str) -> np.float32:
    if amax == 0:
        return np.float32(1)
    scale = max(np.float32(amax) / np.float32(448), np.float32(2.0**-126))
    if scale_format == "ue8m0":
        mantissa, exponent = np.frexp(np.float64(scale))
        scale = np.float32(np.exp2(np.float64(exponent - (mantissa == 0.5))))
    return np.float32(scale)


def reference_quantize(weight: torch.Tensor, scale_format: str):
    """Codes' values and scales of a 2-D weight, block by block, without padding."""
    values = weight.numpy()
    codes = np.zeros(values.shape)
    scales = np.zeros(scale_shape(values.shape), dtype=np.float32)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scales[i, j] = reference_scale(np.abs(values[block]).max(), scale_format)
        codes[block] = round_to_e4m3((values[block] / scales[i, j]).astype(np.float64))
    return codes, scales


# Layout


@fast
@given(shapes, st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]), seeds)
def test_unfold_inverts_fold_to_the_bit(shape, dtype, seed):
    weight = random_bits(shape, dtype, seed)
    tiles = fold(weight)
    assert tiles.shape == (num_tiles(shape), BLOCK, BLOCK) and tiles.dtype == dtype
    assert torch.equal(bits(unfold(tiles, shape)), bits(weight))


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (3, 130, 70), (1, 1)])
def test_tiles_are_in_expert_row_column_order_and_zero_padded(shape):
    weight = torch.randn(shape)
    tiles = fold(weight)
    experts, block_rows, block_cols = block_grid(shape)
    stacked = weight.view(experts, *shape[-2:])
    index = 0
    for e in range(experts):
        for i in range(block_rows):
            for j in range(block_cols):
                block = stacked[e, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                expected = torch.zeros(BLOCK, BLOCK)
                expected[: block.shape[0], : block.shape[1]] = block
                assert torch.equal(tiles[index], expected)
                index += 1
    assert index == len(tiles)


@pytest.mark.parametrize("shape", [(128, 128), (256, 128), (128, 256), (2, 128, 128), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_fold_returns_its_own_storage(shape, dtype):
    weight = torch.ones(shape).to(dtype)
    fold(weight).view(torch.uint8).zero_()
    assert torch.equal(weight.float(), torch.ones(shape))


def test_fold_of_a_transposed_weight():
    weight = torch.randn(300, 200)
    assert torch.equal(fold(weight.t()), fold(weight.t().contiguous()))


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"2-D or 3-D weight, got \(5,\)"):
        fold(torch.zeros(5))
    with pytest.raises(ValueError, match=r"\(6, 128, 128\), got \(5, 128, 128\)"):
        unfold(torch.zeros(5, 128, 128), (200, 300))
    codes, scale_inv = quantize_blockwise(torch.randn(200, 300))
    with pytest.raises(ValueError, match=r"need scale_inv \(2, 3\), got \(3, 2\)"):
        dequantize_blockwise(codes, scale_inv.t())
    with pytest.raises(ValueError, match=r"scale_format must be one of .* got 'fp16'"):
        quantize_blockwise(torch.randn(2, 2), "fp16")


# Quantization


@fast
@given(
    st.tuples(sizes, sizes), seeds, st.sampled_from(FORMATS), st.sampled_from([-4.0, -20.0, -100.0])
)
def test_quantize_equals_the_fp64_reference(shape, seed, scale_format, low):
    weight = log_uniform(shape, seed, low, 3)
    codes, scale_inv = quantize_blockwise(weight, scale_format)
    expected_codes, expected_scale = reference_quantize(weight, scale_format)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == shape
    assert np.array_equal(scale_inv.numpy(), expected_scale)
    assert np.array_equal(codes.float().numpy(), expected_codes)
    dequantized = dequantize_blockwise(codes, scale_inv).numpy()
    for i, j in np.ndindex(expected_scale.shape):
        block = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        product = expected_codes[block].astype(np.float32) * expected_scale[i, j]
        assert np.array_equal(dequantized[block], product)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_experts_are_quantized_separately(scale_format):
    weight = log_uniform((3, 130, 70), seed=0)
    codes, scale_inv = quantize_blockwise(weight, scale_format)
    assert scale_inv.shape == (3, 2, 1)
    for e in range(3):
        expert_codes, expert_scale = quantize_blockwise(weight[e], scale_format)
        assert torch.equal(bits(codes[e]), bits(expert_codes))
        assert torch.equal(scale_inv[e], expert_scale)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_quantizing_tiles_equals_quantizing_the_weight(scale_format):
    weight = log_uniform((200, 300), seed=1)
    codes, scale_inv = quantize_blockwise(weight, scale_format)
    tile_codes, tile_scale = quantize_tiles(fold(weight), scale_format)
    assert torch.equal(bits(unfold(tile_codes, (200, 300))), bits(codes))
    assert torch.equal(tile_scale, scale_inv.flatten())


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("quantize", [quantize_blockwise, quantize_rows])
def test_zero_block_has_scale_one_and_codes_zero(quantize, scale_format):
    codes, scale_inv = quantize(torch.zeros(200, 300), scale_format)
    assert torch.equal(codes.float(), torch.zeros(200, 300))
    assert torch.equal(scale_inv, torch.ones_like(scale_inv))


@pytest.mark.parametrize("scale_format", FORMATS)
def test_zeros_with_a_single_one(scale_format):
    weight = torch.zeros(256, 256)
    weight[200, 3] = 1.0
    codes, scale_inv = quantize_blockwise(weight, scale_format)
    assert torch.equal(scale_inv == 1.0, torch.tensor([[True, True], [False, True]]))
    dequantized = dequantize_blockwise(codes, scale_inv)
    assert dequantized.count_nonzero() == 1
    assert dequantized[200, 3] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("amax", [3e38, 1.0, 1e-10, 1e-30, 1e-38, 9e-43, 3e-43, 1.4e-45])
@pytest.mark.parametrize(
    ("quantize", "dequantize"),
    [(quantize_blockwise, dequantize_blockwise), (quantize_rows, dequantize_rows)],
)
def test_extreme_amax(amax, scale_format, quantize, dequantize):
    weight = torch.linspace(-1, 1, BLOCK * BLOCK, dtype=torch.float64).view(BLOCK, BLOCK)
    weight = (weight * amax).float()
    weight[:, 0] = amax  # every 1x128 group too
    codes, scale_inv = quantize(weight, scale_format)
    assert scale_inv.isfinite().all() and (scale_inv >= SMALLEST_NORMAL).all()
    dequantized = dequantize(codes, scale_inv)
    assert dequantized.isfinite().all()
    # Half a unit in the last place of a 3-bit mantissa, and of the smallest e4m3 step, 2^-9.
    error = (dequantized.double() - weight.double()).abs()
    step = scale_inv.double().max() * 2.0**-10
    assert (error <= weight.double().abs() * 2.0**-4 + step + 2.0**-150).all()


@fast
@given(seeds, st.floats(-140, 127))
def test_ue8m0_scale_is_the_smallest_sufficient_power_of_two(seed, exponent):
    weight = log_uniform((100, 100), seed, exponent - 5, exponent)
    _, scale_inv = quantize_blockwise(weight, "ue8m0")
    scale, amax = scale_inv.double().item(), weight.abs().max().double().item()
    assert np.frexp(scale)[0] == 0.5
    assert scale >= amax / 448 or np.isclose(scale, amax / 448, rtol=2**-23)
    assert scale / 2 < amax / 448 or scale == SMALLEST_NORMAL


@fast
@given(seeds, st.sampled_from(FORMATS), st.floats(-140, 120))
def test_codes_never_exceed_448_and_scales_are_normal(seed, scale_format, exponent):
    weight = log_uniform((130, 140), seed, exponent - 10, exponent)
    for quantize in (quantize_blockwise, quantize_rows):
        codes, scale_inv = quantize(weight, scale_format)
        assert codes.float().abs().max() <= 448
        assert (scale_inv >= SMALLEST_NORMAL).all() and scale_inv.isfinite().all()


def test_to_e4m3_saturates_and_keeps_nan():
    values = torch.tensor([448.0, 464.0, 500.0, 1e9, float("inf")])
    assert torch.equal(to_e4m3(values).float(), torch.full((5,), 448.0))
    assert torch.equal(to_e4m3(-values).float(), torch.full((5,), -448.0))
    assert to_e4m3(torch.tensor(float("nan"))).float().isnan()


def test_shapes_of_576x7168():
    codes, scale_inv = quantize_blockwise(torch.randn(576, 7168))
    assert codes.shape == (576, 7168) and scale_inv.shape == (5, 56)
    assert scale_inv.dtype == torch.float32


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("quantize", "dequantize"),
    [(quantize_blockwise, dequantize_blockwise), (quantize_rows, dequantize_rows)],
)
def test_non_finite_values_stay_visible(bad, scale_format, quantize, dequantize):
    weight = torch.randn(256, 300)
    weight[130, 260] = bad
    codes, scale_inv = quantize(weight, scale_format)
    dequantized = dequantize(codes, scale_inv)
    assert dequantized[130, 260].isnan()
    assert not scale_inv.isfinite().all()
    assert dequantized[:128].isfinite().all()


@fast
@given(st.tuples(st.integers(0, 40), sizes), seeds, st.sampled_from(FORMATS))
def test_rows_are_quantized_in_groups_of_128(shape, seed, scale_format):
    x = log_uniform(shape, seed)
    codes, scale_inv = quantize_rows(x, scale_format)
    assert codes.shape == shape and codes.is_contiguous()
    assert scale_inv.shape == (shape[0], -(-shape[1] // BLOCK))
    expected = np.zeros(shape, dtype=np.float32)
    for row, group in np.ndindex(tuple(scale_inv.shape)):
        part = np.s_[row, group * BLOCK : (group + 1) * BLOCK]
        values = x.numpy()[part]
        scale = reference_scale(np.abs(values).max(), scale_format)
        assert scale_inv[row, group].item() == scale
        expected[part] = round_to_e4m3((values / scale).astype(np.float64)).astype("f4") * scale
    assert np.array_equal(dequantize_rows(codes, scale_inv).numpy(), expected)


def test_bf16_input_is_quantized_as_its_fp32_values():
    x = torch.randn(200, 300, dtype=torch.bfloat16)
    for quantize in (quantize_blockwise, quantize_rows):
        for ours, theirs in zip(quantize(x), quantize(x.float()), strict=True):
            assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize_rounds_once(dtype):
    codes, scale_inv = quantize_blockwise(torch.randn(200, 300))
    exact = dequantize_blockwise(codes, scale_inv)
    assert torch.equal(dequantize_blockwise(codes, scale_inv, dtype), exact.to(dtype))
