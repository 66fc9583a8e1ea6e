"""Unfold: the gathered tiles of a bucket into the compute weights it publishes, in one launch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.blocks import BLOCK, block_grid
from titan_fp8zero.kernels.quantize import TILE
from titan_fp8zero.kernels.transpose import transposed_words
from titan_fp8zero.operands import ALIGNMENT
from titan_fp8zero.ops import define_op, fake_of

_COLUMNS = tl.constexpr(5)
_SIDE_BITS = tl.constexpr(23)
_SIDE_MASK = tl.constexpr((1 << 23) - 1)
_EXTENT_BITS = tl.constexpr(8)
_EXTENT_MASK = tl.constexpr((1 << 8) - 1)
_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(BLOCK // 4)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_NUM_WARPS = 2


class Destinations(NamedTuple):
    """Where the tiles of a bucket go: the last arguments of `unfold_tiles`."""

    table: Tensor
    """int64 `[tiles, 5]`: unit of the bucket, then the addresses of the tile's first code, of its
    first transposed code, and of its scale, then R, C, and the rows and columns inside the weight,
    in 23, 23, 8 and 8 bits."""
    codes: list[Tensor]
    """e4m3 `[R, C]` or `[E, R, C]` a weight, contiguous."""
    scale_inv: list[Tensor]
    """fp32 `[..., ceil(R/128), ceil(C/128)]` a weight, contiguous."""
    transposed: list[Tensor]
    """e4m3 `[C, R]` or `[E, C, R]` a weight, contiguous; empty where none are kept."""


def make_destinations(
    units: Sequence[Tensor],
    codes: Sequence[Tensor],
    scale_inv: Sequence[Tensor],
    transposed: Sequence[Tensor] = (),
) -> Destinations:
    """The table for weights whose tiles, in order, are `units` (int64 `[T]` each) of the bucket.

    Unit u of a bucket is tile `u % units_per_rank` of rank `u // units_per_rank`. The tensors must
    keep their addresses. Raises ValueError for one that is not contiguous, or 2^23 long or longer.
    """
    copies: Sequence[Tensor | None] = list(transposed) or [None] * len(codes)
    rows = [
        _table_rows(*of_weight) for of_weight in zip(units, codes, scale_inv, copies, strict=True)
    ]
    table = torch.cat(rows).to(codes[0].device)
    return Destinations(table, list(codes), list(scale_inv), list(transposed))


def _table_rows(units: Tensor, codes: Tensor, scale: Tensor, transposed: Tensor | None) -> Tensor:
    rows, cols = codes.shape[-2:]
    tensors = [codes, scale] if transposed is None else [codes, scale, transposed]
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"compute weights must be contiguous, those of {codes.shape} are not")
    if max(rows, cols) >= 1 << _SIDE_BITS.value:
        raise ValueError(f"a weight of shape {tuple(codes.shape)} is too long to unfold: 2^23")
    experts, block_rows, block_cols = block_grid(tuple(codes.shape))
    grid = (torch.arange(n) for n in (experts, block_rows, block_cols))
    expert, i, j = (t.flatten() for t in torch.meshgrid(*grid, indexing="ij"))
    row, col = i * BLOCK, j * BLOCK
    corner = expert * rows * cols
    shift = _SIDE_BITS.value
    extent = (cols - col).clamp(max=BLOCK) << _EXTENT_BITS.value | (rows - row).clamp(max=BLOCK)
    return torch.stack(
        [
            units,
            codes.data_ptr() + corner + row * cols + col,
            torch.zeros_like(row)
            if transposed is None
            else transposed.data_ptr() + corner + col * rows + row,
            scale.data_ptr() + torch.arange(len(units)) * scale.itemsize,
            extent << 2 * shift | cols << shift | rows,
        ],
        dim=1,
    )


@triton.jit
def _write_rows(source, target, row_stride, rows, cols):
    # Four loads in flight before the first store.
    i = 4 * tl.arange(0, _BLOCK // 4)[:, None]
    j = tl.arange(0, _BLOCK)[None, :]
    inside = j < cols
    source += i * _BLOCK + j
    target += i * row_stride + j
    a = tl.load(source)
    b = tl.load(source + _BLOCK)
    c = tl.load(source + 2 * _BLOCK)
    d = tl.load(source + 3 * _BLOCK)
    tl.store(target, a, mask=inside & (i < rows))
    tl.store(target + row_stride, b, mask=inside & (i + 1 < rows))
    tl.store(target + 2 * row_stride, c, mask=inside & (i + 2 < rows))
    tl.store(target + 3 * row_stride, d, mask=inside & (i + 3 < rows))


@triton.jit
def _write_both_by_bytes(source, target, row_stride, transposed, col_stride, rows, cols):
    i = tl.arange(0, _BLOCK)[:, None]
    j = tl.arange(0, _BLOCK)[None, :]
    tile = tl.load(source + i * _BLOCK + j)
    tl.store(target + i * row_stride + j, tile, mask=(i < rows) & (j < cols))
    tl.store(transposed + i * col_stride + j, tl.trans(tile), mask=(i < cols) & (j < rows))


@triton.jit
def _write_both_by_words(source, target, row_stride, transposed, col_stride, rows, cols):
    i = tl.arange(0, _WORDS)[:, None]
    j = tl.arange(0, _WORDS)[None, :]
    source = source.to(tl.pointer_type(tl.int32)) + (4 * i) * _WORDS + j
    a = tl.load(source)
    b = tl.load(source + _WORDS)
    c = tl.load(source + 2 * _WORDS)
    d = tl.load(source + 3 * _WORDS)

    row_stride = row_stride // _ALIGNMENT * 4  # words
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    target += (4 * i) * row_stride + j
    inside = j < cols // _ALIGNMENT * 4
    tl.store(target, a, mask=inside & (4 * i < rows))
    tl.store(target + row_stride, b, mask=inside & (4 * i + 1 < rows))
    tl.store(target + 2 * row_stride, c, mask=inside & (4 * i + 2 < rows))
    tl.store(target + 3 * row_stride, d, mask=inside & (4 * i + 3 < rows))

    column0, column1, column2, column3 = transposed_words(a, b, c, d)
    col_stride = col_stride // _ALIGNMENT * 4
    transposed = tl.multiple_of(transposed.to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    transposed += (4 * i) * col_stride + j
    inside = j < rows // _ALIGNMENT * 4
    tl.store(transposed, column0, mask=inside & (4 * i < cols))
    tl.store(transposed + col_stride, column1, mask=inside & (4 * i + 1 < cols))
    tl.store(transposed + 2 * col_stride, column2, mask=inside & (4 * i + 2 < cols))
    tl.store(transposed + 3 * col_stride, column3, mask=inside & (4 * i + 3 < cols))


@triton.jit(do_not_specialize=["units_per_rank", "rank_scale_stride"])
def _unfold_tiles(
    table,
    codes,
    scale_inv,
    units_per_rank,
    rank_stride,
    rank_scale_stride,
    TRANSPOSED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    entry = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    unit = tl.load(entry).to(tl.int32)
    target = tl.load(entry + 1)
    transposed = tl.load(entry + 2)
    scale_target = tl.load(entry + 3)
    shape = tl.load(entry + 4)
    row_count = (shape & _SIDE_MASK).to(tl.int32)
    col_count = ((shape >> _SIDE_BITS) & _SIDE_MASK).to(tl.int32)
    extent = (shape >> (2 * _SIDE_BITS)).to(tl.int32)
    rows = extent & _EXTENT_MASK
    cols = extent >> _EXTENT_BITS
    target = target.to(tl.pointer_type(tl.uint8))
    transposed = transposed.to(tl.pointer_type(tl.uint8))
    if ALIGNED:  # changes nothing, but tells the compiler, which then writes 16 bytes at a time
        target = tl.multiple_of(target, _ALIGNMENT)
        transposed = tl.multiple_of(transposed, _ALIGNMENT)
        row_count = row_count // _ALIGNMENT * _ALIGNMENT
        col_count = col_count // _ALIGNMENT * _ALIGNMENT
        rows = rows // _ALIGNMENT * _ALIGNMENT
        cols = cols // _ALIGNMENT * _ALIGNMENT

    rank = (unit // units_per_rank).to(tl.int64)
    local = (unit % units_per_rank).to(tl.int64)
    scale = tl.load(scale_inv + rank * rank_scale_stride + local)
    tl.store(scale_target.to(tl.pointer_type(tl.float32)), scale)

    source = codes + rank * rank_stride + local * TILE
    if not TRANSPOSED:
        _write_rows(source, target, col_count, rows, cols)
    elif ALIGNED:
        _write_both_by_words(source, target, col_count, transposed, row_count, rows, cols)
    else:
        _write_both_by_bytes(source, target, col_count, transposed, row_count, rows, cols)


def launch_unfold_tiles(
    codes: Tensor,
    scale_inv: Tensor,
    table: Tensor,
    weight_codes: Sequence[Tensor],
    weight_scale_inv: Sequence[Tensor],
    transposed: Sequence[Tensor],
) -> None:
    """`unfold_tiles` by the kernel: a tile a program."""
    _unfold_tiles[(len(table),)](
        table,
        codes.view(torch.uint8),
        scale_inv,
        codes.shape[1],
        codes.stride(0),
        scale_inv.stride(0),
        TRANSPOSED=bool(transposed),
        ALIGNED=all(map(_is_aligned, [*weight_codes, *transposed])),
        num_warps=_NUM_WARPS,
    )


def _is_aligned(codes: Tensor) -> bool:
    return not any(n % ALIGNMENT for n in (codes.data_ptr(), *codes.shape[-2:]))


@define_op(
    cuda=launch_unfold_tiles, mutates_args=("weight_codes", "weight_scale_inv", "transposed")
)
def unfold_tiles(
    codes: Tensor,
    scale_inv: Tensor,
    table: Tensor,
    weight_codes: Sequence[Tensor],
    weight_scale_inv: Sequence[Tensor],
    transposed: Sequence[Tensor],
) -> None:
    """Unfold codes e4m3 `[ranks, units_per_rank, 128, 128]`, and copy scale_inv fp32
    `[ranks, units_per_rank]`, into weights and, if there are any, their transposed copies.

    The last four arguments are `Destinations`. A rank's tiles and scales are contiguous.
    """
    blocks.unfold_tiles(codes, scale_inv, table[:, 0], weight_codes, weight_scale_inv, transposed)


@fake_of(unfold_tiles)
def _(codes, scale_inv, table, weight_codes, weight_scale_inv, transposed):
    return None
