"""Fold-accumulate: a row-major gradient, added to the tiles of a main parameter's gradient."""

import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.quantize import TILE
from titan_fp8zero.ops import define_op, fake_of

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
    IS_FIRST: tl.constexpr,
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
    total = addend.to(tl.float32)
    if IS_FIRST:
        total += 0.0  # as if added to zeros: no -0
    else:
        total += tl.load(target).to(tl.float32)
    tl.store(target, total.to(rank_tiles.dtype.element_ty))


def launch_fold_add(
    rank_tiles: Tensor, gradient: Tensor, start: int, is_first: bool = False
) -> None:
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
        IS_FIRST=is_first,
        num_warps=_NUM_WARPS,
    )


def _check_rank_tiles(rank_tiles: Tensor) -> None:
    # Ranks lie apart, the tiles of one end to end.
    if rank_tiles.stride()[1:] != (blocks.TILE_NUMEL, BLOCK, 1):
        raise ValueError(
            "rank_tiles must be [ranks, units_per_rank, 128, 128] with contiguous ranks, got "
            f"shape {tuple(rank_tiles.shape)} with strides {rank_tiles.stride()}"
        )


@define_op(cuda=launch_fold_add, mutates_args=("rank_tiles",))
def fold_add(rank_tiles: Tensor, gradient: Tensor, start: int, is_first: bool = False) -> None:
    """Add a gradient `[R, C]` or `[E, R, C]`, of any strides, to tiles in place.

    `rank_tiles` `[ranks, units_per_rank, 128, 128]`, fp32 or bf16, holds a main parameter's units
    rank by rank; the gradient's first tile is unit `start` of it. Adds in fp32, rounds once. The
    first gradient is written over what was there.
    """
    blocks.fold_add(rank_tiles, gradient, start, is_first)


@fake_of(fold_add)
def _(rank_tiles, gradient, start, is_first=False):
    return None
