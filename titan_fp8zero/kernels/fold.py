"""Fold-accumulate: a row-major gradient, added to the tiles of a main parameter's gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.quantize import TILE

_BLOCK = tl.constexpr(BLOCK)
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["start", "block_rows", "block_cols", "units_per_rank"])
def _fold_add(
    rank_tiles,
    gradient,
    start,
    rows,
    cols,
    block_rows,
    block_cols,
    units_per_rank,
    rank_stride,
    expert_stride,
    row_stride,
    col_stride,
    HAS_EDGE: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tile // (block_rows * block_cols)
    first_row = tile // block_cols % block_rows * _BLOCK
    first_col = tile % block_cols * _BLOCK
    i = tl.arange(0, _BLOCK)[:, None]
    j = tl.arange(0, _BLOCK)[None, :]
    corner = (
        expert.to(tl.int64) * expert_stride
        + first_row.to(tl.int64) * row_stride
        + first_col.to(tl.int64) * col_stride
    )
    source = gradient + corner + (i * row_stride + j * col_stride)
    if HAS_EDGE:
        inside = (first_row + i < rows) & (first_col + j < cols)
        addend = tl.load(source, mask=inside, other=0.0)
    else:
        addend = tl.load(source)
    unit = start + tile
    row = (unit // units_per_rank).to(tl.int64) * rank_stride
    target = rank_tiles + row + (unit % units_per_rank).to(tl.int64) * TILE + (i * _BLOCK + j)
    total = tl.load(target).to(tl.float32) + addend.to(tl.float32)
    tl.store(target, total.to(rank_tiles.dtype.element_ty))


def launch_fold_add(rank_tiles: Tensor, gradient: Tensor, start: int) -> None:
    """`fold_add` by the kernel: a tile a program."""
    _check_rank_tiles(rank_tiles)
    experts, block_rows, block_cols = blocks.block_grid(tuple(gradient.shape))
    rows, cols = gradient.shape[-2:]
    _fold_add[(experts * block_rows * block_cols,)](
        rank_tiles,
        gradient,
        start,
        rows,
        cols,
        block_rows,
        block_cols,
        rank_tiles.shape[1],
        rank_tiles.stride(0),
        gradient.stride(0) if gradient.dim() == 3 else 0,
        gradient.stride(-2),
        gradient.stride(-1),
        HAS_EDGE=rows % BLOCK != 0 or cols % BLOCK != 0,
        num_warps=_NUM_WARPS,
    )


def _check_rank_tiles(rank_tiles: Tensor) -> None:
    # Ranks lie apart, the tiles of one end to end.
    if rank_tiles.stride()[1:] != (blocks.TILE_NUMEL, BLOCK, 1):
        raise ValueError(
            "rank_tiles must be [ranks, units_per_rank, 128, 128] with contiguous ranks, got "
            f"shape {tuple(rank_tiles.shape)} with strides {rank_tiles.stride()}"
        )


@torch.library.custom_op(
    "titan_fp8zero::fold_add", mutates_args=("rank_tiles",), device_types="cpu"
)
def fold_add(rank_tiles: Tensor, gradient: Tensor, start: int) -> None:
    """Add a gradient `[R, C]` or `[E, R, C]`, of any strides, to tiles in place.

    `rank_tiles` `[ranks, units_per_rank, 128, 128]`, fp32 or bf16, holds a main parameter's units
    rank by rank; the gradient's first tile is unit `start` of it. Adds in fp32, rounds once.
    """
    blocks.fold_add(rank_tiles, gradient, start)


fold_add.register_kernel("cuda", launch_fold_add)


@fold_add.register_fake
def _(rank_tiles, gradient, start):
    return None
