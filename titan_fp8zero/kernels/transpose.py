"""Transposing FP8 codes: square blocks make that of a weight a transpose of bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.operands import ALIGNMENT

_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(BLOCK // 4)
_NUM_WARPS = 2


@triton.jit
def transposed_words(a, b, c, d):
    """The columns, each a word, of four rows of four bytes; then a transpose of words."""
    # Bytes 0 and 2, then 1 and 3, of two rows side by side. (tl.trans of FP8 has been miscompiled.)
    ab_even = (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)
    ab_odd = ((a >> 8) & 0x00FF00FF) | (b & -0x00FF0100)
    cd_even = (c & 0x00FF00FF) | ((d & 0x00FF00FF) << 8)
    cd_odd = ((c >> 8) & 0x00FF00FF) | (d & -0x00FF0100)
    column0 = (ab_even & 0xFFFF) | (cd_even << 16)
    column1 = (ab_odd & 0xFFFF) | (cd_odd << 16)
    column2 = ((ab_even >> 16) & 0xFFFF) | (cd_even & -0x10000)
    column3 = ((ab_odd >> 16) & 0xFFFF) | (cd_odd & -0x10000)
    return tl.trans(column0), tl.trans(column1), tl.trans(column2), tl.trans(column3)


@triton.jit
def _load_words(source, row, rows, words, words_per_row):
    word = tl.arange(0, _WORDS)[None, :]
    inside = (row < rows) & (word < words)
    return tl.load(source + (row * words_per_row + word), mask=inside, other=0)


@triton.jit
def _store_words(target, row, values, rows, words, words_per_row):
    word = tl.arange(0, _WORDS)[None, :]
    inside = (row < rows) & (word < words)
    tl.store(target + (row * words_per_row + word), values, mask=inside)


@triton.jit
def _transpose(source, target, rows, cols, IS_ALIGNED: tl.constexpr):
    first_row, first_col = tl.program_id(1) * _BLOCK, tl.program_id(0) * _BLOCK
    matrix = tl.program_id(2).to(tl.int64) * rows * cols
    source += matrix + first_row.to(tl.int64) * cols + first_col
    target += matrix + first_col.to(tl.int64) * rows + first_row
    rows_here, cols_here = rows - first_row, cols - first_col
    if IS_ALIGNED:
        source = source.to(tl.pointer_type(tl.int32))
        target = target.to(tl.pointer_type(tl.int32))
        row = 4 * tl.arange(0, _WORDS)[:, None]
        a = _load_words(source, row, rows_here, cols_here // 4, cols // 4)
        b = _load_words(source, row + 1, rows_here, cols_here // 4, cols // 4)
        c = _load_words(source, row + 2, rows_here, cols_here // 4, cols // 4)
        d = _load_words(source, row + 3, rows_here, cols_here // 4, cols // 4)
        a, b, c, d = transposed_words(a, b, c, d)
        _store_words(target, row, a, cols_here, rows_here // 4, rows // 4)
        _store_words(target, row + 1, b, cols_here, rows_here // 4, rows // 4)
        _store_words(target, row + 2, c, cols_here, rows_here // 4, rows // 4)
        _store_words(target, row + 3, d, cols_here, rows_here // 4, rows // 4)
    else:
        i, j = tl.arange(0, _BLOCK)[:, None], tl.arange(0, _BLOCK)[None, :]
        tile = tl.load(source + (i * cols + j), mask=(i < rows_here) & (j < cols_here), other=0)
        inside = (i < cols_here) & (j < rows_here)
        tl.store(target + (i * rows + j), tl.trans(tile), mask=inside)


def launch_transpose(codes: Tensor) -> Tensor:
    """Contiguous codes e4m3 `[R, C]` or `[E, R, C]` -> `[C, R]` or `[E, C, R]`, contiguous."""
    rows, cols = codes.shape[-2:]
    target = codes.new_empty((*codes.shape[:-2], cols, rows))
    experts = codes.shape[0] if codes.dim() == 3 else 1
    grid = (triton.cdiv(cols, BLOCK), triton.cdiv(rows, BLOCK), experts)
    if 0 not in grid:
        _transpose[grid](
            codes.view(torch.uint8),
            target.view(torch.uint8),
            rows,
            cols,
            IS_ALIGNED=rows % ALIGNMENT == 0 and cols % ALIGNMENT == 0,
            num_warps=_NUM_WARPS,
        )
    return target


def rows_of(codes: Tensor) -> Tensor:
    """Codes on a GPU as contiguous rows: themselves, or a copy if they are a transposed view."""
    return codes if codes.is_contiguous() else launch_transpose(codes.transpose(-2, -1))
