"""AdamW and quantization of main parameters' local tiles in one pass over memory."""

import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.kernels.quantize import (
    NUM_WARPS,
    TILE,
    check_tiles,
    is_ue8m0,
    quantize_tiles,
    store_quantized,
)
from titan_fp8zero.ops import define_op, fake_of


@triton.jit
def _update_tiles(
    main,
    gradient,
    exp_avg,
    exp_avg_sq,
    codes,
    scale_inv,
    hyperparameters,
    beta1_complement,
    beta2,
    beta2_complement,
    eps,
    UE8M0: tl.constexpr,
    ROUND_TO_BF16: tl.constexpr,
):
    tile = tl.program_id(0)
    offsets = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    hyperparameters += tile * 4
    decay = tl.load(hyperparameters)
    step_size = tl.load(hyperparameters + 1)
    correction = tl.load(hyperparameters + 2)
    clip_factor = tl.load(hyperparameters + 3)

    g = tl.load(gradient + offsets).to(tl.float32) * clip_factor
    m = tl.load(exp_avg + offsets).to(tl.float32)
    m += (g - m) * beta1_complement
    tl.store(exp_avg + offsets, m.to(exp_avg.dtype.element_ty))
    v = tl.load(exp_avg_sq + offsets).to(tl.float32)
    v = v * beta2 + g * g * beta2_complement
    tl.store(exp_avg_sq + offsets, v.to(exp_avg_sq.dtype.element_ty))
    p = tl.load(main + offsets) * decay
    p -= step_size * m / (tl.sqrt(v) * correction + eps)
    tl.store(main + offsets, p)
    store_quantized(p, offsets, tile, codes, scale_inv, UE8M0, ROUND_TO_BF16)


def launch_update_tiles(
    main: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    codes: Tensor,
    scale_inv: Tensor,
    hyperparameters: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    scale_format: str,
    round_main_to_bf16: bool,
) -> None:
    """`update_tiles` by the kernel: a tile a program, each a flat range of memory."""
    if hyperparameters.shape != (len(main), 4) or not hyperparameters.is_contiguous():
        raise ValueError(
            f"hyperparameters must be contiguous [{len(main)}, 4], a row a tile, got shape "
            f"{tuple(hyperparameters.shape)} and strides {hyperparameters.stride()}"
        )
    check_tiles(main=main, gradient=gradient, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, codes=codes)
    _update_tiles[(len(main),)](
        main,
        gradient,
        exp_avg,
        exp_avg_sq,
        codes,
        scale_inv,
        hyperparameters,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        UE8M0=is_ue8m0(scale_format),
        ROUND_TO_BF16=round_main_to_bf16,
        num_warps=NUM_WARPS,
    )


@define_op(
    cuda=launch_update_tiles, mutates_args=("main", "exp_avg", "exp_avg_sq", "codes", "scale_inv")
)
def update_tiles(
    main: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    codes: Tensor,
    scale_inv: Tensor,
    hyperparameters: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    scale_format: str,
    round_main_to_bf16: bool,
) -> None:
    """Update tiles `[T, 128, 128]` by AdamW, in place, and quantize the result.

    `main` is fp32, `gradient` and the moments are fp32 or bf16, `hyperparameters` is what
    `blocks.update_tiles` takes, on the tiles' device: a captured CUDA graph reads it anew in every
    replay. Codes e4m3 `[T, 128, 128]` and scale_inv fp32 `[T]` as in `quantize_tiles`.
    """
    blocks.update_tiles(main, gradient, exp_avg, exp_avg_sq, hyperparameters, (beta1, beta2), eps)
    quantize_tiles(main, codes, scale_inv, scale_format, round_main_to_bf16)


@fake_of(update_tiles)
def _(
    main,
    gradient,
    exp_avg,
    exp_avg_sq,
    codes,
    scale_inv,
    hyperparameters,
    beta1,
    beta2,
    eps,
    scale_format,
    round_main_to_bf16,
):
    return None
