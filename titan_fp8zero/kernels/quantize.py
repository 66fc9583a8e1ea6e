"""Quantizing tiles, and what all kernels share: scales and codes that equal `blocks.py` to the bit.

A division an element (`div_rn`) halves the bandwidth that kernels reach. Instead each group divides
once, 1 / scale, and elements are corrected by the remainder of the product: Markstein's theorem
(P. Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990)
gives the correctly rounded quotient.
"""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.blocks import SCALE_FORMATS, TILE_NUMEL, ScaleFormat
from titan_fp8zero.ops import define_op, fake_of

TILE = tl.constexpr(TILE_NUMEL)
NUM_WARPS = 16

_E4M3_MAX = tl.constexpr(blocks.E4M3_MAX)
_E4M3_MAX_RECIPROCAL = tl.constexpr(torch.tensor(1 / blocks.E4M3_MAX).item())
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL_BITS = tl.constexpr(0x00800000)
_LIFT_BELOW = tl.constexpr(2.0**-60)
_LIFT = tl.constexpr(2.0**64)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| (fp32) as int32. They order as magnitudes do, NaN last, and a maximum over them
    loses neither NaN nor subnormal values, as one over floats may."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax_bits, UE8M0: tl.constexpr):
    """`blocks.scale_from_amax` of the bits of the largest magnitudes."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    quotient = amax * _E4M3_MAX_RECIPROCAL
    excess = tl.fma(quotient, _E4M3_MAX, amax * -1.0)
    scale = tl.fma(excess, -_E4M3_MAX_RECIPROCAL, quotient)
    bits = tl.maximum(scale.to(tl.int32, bitcast=True), _SMALLEST_NORMAL_BITS)
    if UE8M0:
        bits = (bits + 0x7FFFFF) & _INFINITY_BITS
    bits = tl.where(amax_bits < _INFINITY_BITS, bits, amax_bits)
    return tl.where(amax_bits == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def divisor_of(scale):
    """(lift, divisor, reciprocal) of scales, for `quotient_of`.

    Below 2^-60 the remainder of a quotient could be subnormal and lose bits: x and scale are
    lifted by 2^64 there. An infinite scale has reciprocal 0, and gives quotients of the right sign,
    0 and NaN, with 0 as the divisor in the remainder.
    """
    lift = tl.where(scale < _LIFT_BELOW, _LIFT, 1.0)
    lifted = scale * lift
    divisor = tl.where(lifted == float("inf"), 0.0, lifted)
    return lift, divisor, tl.div_rn(1.0, lifted)


@triton.jit
def quotient_of(x, lift, divisor, reciprocal):
    """x / scale, correctly rounded."""
    x = x * lift
    quotient = x * reciprocal
    # quotient * divisor - x, in this order: a zero remainder is +0 and -0 / scale stays -0. Triton
    # 3.6 takes -x for 0 - x, which has no -0; the product is a true negation, and as free.
    excess = tl.fma(quotient, divisor, x * -1.0)
    return tl.fma(excess, reciprocal * -1.0, quotient)


@triton.jit
def codes_of(x, lift, divisor, reciprocal):
    """`blocks.to_e4m3` of x / scale: the conversion saturates."""
    return quotient_of(x, lift, divisor, reciprocal).to(tl.float8e4nv)


@triton.jit
def store_quantized(
    main, offsets, tile, codes, scale_inv, UE8M0: tl.constexpr, ROUND_TO_BF16: tl.constexpr
):
    """Quantize one flat tile of a main parameter."""
    if ROUND_TO_BF16:
        main = main.to(tl.bfloat16).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(main), 0), UE8M0)
    lift, divisor, reciprocal = divisor_of(scale)
    tl.store(codes + offsets, codes_of(main, lift, divisor, reciprocal))
    tl.store(scale_inv + tile, scale)


@triton.jit
def _quantize_tiles(main, codes, scale_inv, UE8M0: tl.constexpr, ROUND_TO_BF16: tl.constexpr):
    tile = tl.program_id(0)
    offsets = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    store_quantized(tl.load(main + offsets), offsets, tile, codes, scale_inv, UE8M0, ROUND_TO_BF16)


def launch_quantize_tiles(
    main: Tensor, codes: Tensor, scale_inv: Tensor, scale_format: str, round_main_to_bf16: bool
) -> None:
    """`quantize_tiles` by the kernel."""
    check_tiles(main=main, codes=codes)
    _quantize_tiles[(len(main),)](
        main,
        codes,
        scale_inv,
        UE8M0=is_ue8m0(scale_format),
        ROUND_TO_BF16=round_main_to_bf16,
        num_warps=NUM_WARPS,
    )


@define_op(cuda=launch_quantize_tiles, mutates_args=("codes", "scale_inv"))
def quantize_tiles(
    main: Tensor, codes: Tensor, scale_inv: Tensor, scale_format: str, round_main_to_bf16: bool
) -> None:
    """Quantize fp32 tiles `[T, 128, 128]` into codes e4m3 `[T, 128, 128]` and scale_inv fp32 `[T]`.

    Rounds main values to bf16 first if so told; `main` itself stays. All contiguous.
    """
    if round_main_to_bf16:
        main = main.bfloat16().float()
    new_codes, new_scale_inv = blocks.quantize_tiles(main, cast(ScaleFormat, scale_format))
    codes.copy_(new_codes)
    scale_inv.copy_(new_scale_inv)


@fake_of(quantize_tiles)
def _(main, codes, scale_inv, scale_format, round_main_to_bf16):
    return None


def is_ue8m0(scale_format: str) -> bool:
    """Whether scales are powers of two; ValueError for an unknown format."""
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {SCALE_FORMATS}, got {scale_format!r}")
    return scale_format == "ue8m0"


def check_tiles(**tensors: Tensor) -> None:
    """ValueError for tensors that are no contiguous tiles `[T, 128, 128]`, all of one T."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.shape[1:] != (blocks.BLOCK, blocks.BLOCK):
            raise ValueError(
                f"{name} must be contiguous tiles [T, 128, 128], got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
    counts = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"not the same number of tiles: {counts}")
