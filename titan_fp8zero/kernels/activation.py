"""Quantizing activations: 1x128 groups of rows, and 128x1 groups of columns, transposed.

The launches of the ops `quantize_rows`, `quantize_columns` and `quantize_rows_and_columns` in
`gemm.py`, which say what comes out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.quantize import (
    codes_of,
    divisor_of,
    is_ue8m0,
    magnitude_bits,
    quotient_of,
    scale_of,
)

_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(BLOCK // 4)
_NUM_WARPS = 8

# Four codes in a word. Triton's own conversion leaves each in a register, to be shifted and merged.
_PACK = tl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)


# Offsets inside a tile of 128x128 are int32, those of its corner are scalars of int64.


@triton.jit
def _quantize_row_groups(
    x,
    codes,
    scale_inv,
    rows,
    cols,
    row_stride,
    col_stride,
    code_stride,
    groups,
    UE8M0: tl.constexpr,
):
    """Of one tile, `rows` x `cols` of which are inside; all pointers are those of its corner."""
    i = tl.arange(0, _BLOCK)
    row, col = i[:, None], tl.arange(0, _BLOCK)[None, :]
    inside = (row < rows) & (col < cols)
    values = tl.load(x + (row * row_stride + col * col_stride), mask=inside, other=0.0)
    values = values.to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(values), 1), UE8M0)
    lift, divisor, reciprocal = divisor_of(scale)
    quantized = codes_of(values, lift[:, None], divisor[:, None], reciprocal[:, None])
    tl.store(codes + (row * code_stride + col), quantized, mask=inside)
    tl.store(scale_inv + i * groups, scale, mask=i < rows)


@triton.jit
def _load_phase(x, phase: tl.constexpr, rows, cols, row_stride, col_stride):
    """Every fourth row of a tile, from row `phase`."""
    row = 4 * tl.arange(0, _WORDS)[:, None] + phase
    col = tl.arange(0, _BLOCK)[None, :]
    inside = (row < rows) & (col < cols)
    return tl.load(x + (row * row_stride + col * col_stride), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _quantize_column_groups(
    x,
    codes,
    scale_inv,
    rows,
    cols,
    row_stride,
    col_stride,
    code_stride,
    words_here,
    words_per_column,
    groups,
    UE8M0: tl.constexpr,
    BY_WORDS: tl.constexpr,
):
    """Of one tile, as `_quantize_row_groups`."""
    # The codes of four rows are the bytes of a word, which tl.trans moves whole. (Triton has
    # miscompiled transposes of FP8.)
    a = _load_phase(x, 0, rows, cols, row_stride, col_stride)
    b = _load_phase(x, 1, rows, cols, row_stride, col_stride)
    c = _load_phase(x, 2, rows, cols, row_stride, col_stride)
    d = _load_phase(x, 3, rows, cols, row_stride, col_stride)
    ab = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    cd = tl.maximum(magnitude_bits(c), magnitude_bits(d))
    scale = scale_of(tl.max(tl.maximum(ab, cd), 0), UE8M0)
    j = tl.arange(0, _BLOCK)
    tl.store(scale_inv + j * groups, scale, mask=j < cols)

    lift, divisor, reciprocal = divisor_of(scale[None, :])
    words = tl.inline_asm_elementwise(
        _PACK,
        "=r,r,r,r,r",
        [
            quotient_of(a, lift, divisor, reciprocal),
            quotient_of(b, lift, divisor, reciprocal),
            quotient_of(c, lift, divisor, reciprocal),
            quotient_of(d, lift, divisor, reciprocal),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    words = tl.trans(words)
    col, word = j[:, None], tl.arange(0, _WORDS)[None, :]
    if BY_WORDS:
        target = codes.to(tl.pointer_type(tl.int32)) + (col * words_per_column + word)
        tl.store(target, words, mask=(col < cols) & (word < words_here))
    else:
        row = 4 * word
        target = codes + (col * code_stride + row)
        tl.store(target, words.to(tl.uint8), mask=(col < cols) & (row < rows))
        tl.store(target + 1, (words >> 8).to(tl.uint8), mask=(col < cols) & (row + 1 < rows))
        tl.store(target + 2, (words >> 16).to(tl.uint8), mask=(col < cols) & (row + 2 < rows))
        tl.store(target + 3, (words >> 24).to(tl.uint8), mask=(col < cols) & (row + 3 < rows))


@triton.jit(do_not_specialize=["row_groups", "column_groups"])
def _quantize_activation(
    x,
    row_codes,
    row_scale_inv,
    column_codes,
    column_scale_inv,
    group_starts,
    group_ends,
    rows,
    cols,
    row_stride,
    col_stride,
    row_groups,
    column_groups,
    words_per_column,
    UE8M0: tl.constexpr,
    BY_WORDS: tl.constexpr,
):
    """128 columns of 128 tokens, or of one group of an expert's tokens. What is None is left out.

    Columns load their values anew, from the first-level cache: rows and columns want them spread
    over threads differently.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    if group_starts is not None:
        first_row = tl.load(group_starts + group)
        end_row = tl.load(group_ends + group)
    else:
        first_row = group.to(tl.int64) * _BLOCK
        end_row = rows
    first_col = block.to(tl.int64) * _BLOCK
    rows_here = tl.minimum(end_row - first_row, _BLOCK).to(tl.int32)
    cols_here = tl.minimum(cols - first_col, _BLOCK).to(tl.int32)
    x += first_row * row_stride + first_col * col_stride
    if row_codes is not None:
        _quantize_row_groups(
            x,
            row_codes + (first_row * cols + first_col),
            row_scale_inv + (first_row * row_groups + block),
            rows_here,
            cols_here,
            row_stride,
            col_stride,
            cols,
            row_groups,
            UE8M0,
        )
    if column_codes is not None:
        _quantize_column_groups(
            x,
            column_codes + (first_col * rows + first_row),
            column_scale_inv + (first_col * column_groups + group),
            rows_here,
            cols_here,
            row_stride,
            col_stride,
            rows,
            tl.minimum(words_per_column - group * _WORDS, _WORDS),
            words_per_column,
            column_groups,
            UE8M0,
            BY_WORDS,
        )


def launch_quantize_rows(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`quantize_rows` by the kernel."""
    row_groups = _empty_row_groups(x)
    _launch(x, scale_format, row_groups=row_groups)
    return row_groups


def launch_quantize_columns(
    x: Tensor, scale_format: str, num_tokens_per_expert: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_columns` by the kernel.

    Grouped, counts stay on the device: tokens beyond x are left out without an error.
    """
    if num_tokens_per_expert is None:
        column_groups = _empty_column_groups(x)
        _launch(x, scale_format, column_groups=column_groups)
        return column_groups
    rows, cols = x.shape
    codes = torch.zeros((cols, rows), dtype=torch.uint8, device=x.device)
    groups = rows // BLOCK + len(num_tokens_per_expert)
    scale_inv = x.new_empty((cols, groups), dtype=torch.float32)
    starts_and_ends = _token_groups(num_tokens_per_expert, groups, rows)
    _launch(
        x, scale_format, column_groups=(codes, scale_inv), group_starts_and_ends=starts_and_ends
    )
    return codes.view(torch.float8_e4m3fn), scale_inv


def launch_quantize_rows_and_columns(
    x: Tensor, scale_format: str, num_tokens_per_expert: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rows_and_columns` by the kernel, which reads x once if it is not grouped."""
    if num_tokens_per_expert is not None:
        return (
            *launch_quantize_rows(x, scale_format),
            *launch_quantize_columns(x, scale_format, num_tokens_per_expert),
        )
    row_groups, column_groups = _empty_row_groups(x), _empty_column_groups(x)
    _launch(x, scale_format, row_groups=row_groups, column_groups=column_groups)
    return *row_groups, *column_groups


def _empty_row_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    codes = x.new_empty((rows, cols), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((rows, triton.cdiv(cols, BLOCK)), dtype=torch.float32)


def _empty_column_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_row_groups(x.t())


def _launch(
    x: Tensor,
    scale_format: str,
    *,
    row_groups: tuple[Tensor | None, Tensor | None] = (None, None),
    column_groups: tuple[Tensor | None, Tensor | None] = (None, None),
    group_starts_and_ends: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    rows, cols = x.shape
    row_codes, row_scale_inv = row_groups
    column_codes, column_scale_inv = column_groups
    is_grouped = group_starts_and_ends[0] is not None
    num_column_groups = triton.cdiv(rows, BLOCK)
    if column_scale_inv is not None:
        num_column_groups = column_scale_inv.shape[1]
    grid = (triton.cdiv(cols, BLOCK), num_column_groups)
    if 0 in grid:
        return
    _quantize_activation[grid](
        x,
        row_codes,
        row_scale_inv,
        None if column_codes is None else column_codes.view(torch.uint8),
        column_scale_inv,
        *group_starts_and_ends,
        rows,
        cols,
        x.stride(0),
        x.stride(1),
        grid[0],
        num_column_groups,
        rows // 4,
        UE8M0=is_ue8m0(scale_format),
        BY_WORDS=not is_grouped and rows % 4 == 0,
        num_warps=_NUM_WARPS,
    )


def _token_groups(num_tokens: Tensor, groups: int, rows: int) -> tuple[Tensor, Tensor]:
    """First token of each 128-token group, and the one after its last; equal for unused groups."""
    num_groups = (num_tokens + BLOCK - 1) // BLOCK
    group_ends, token_ends = num_groups.cumsum(0), num_tokens.cumsum(0)
    group = torch.arange(groups, device=num_tokens.device)
    expert = torch.searchsorted(group_ends, group, right=True)
    is_used = expert < len(num_tokens)
    expert = expert.clamp(max=len(num_tokens) - 1)
    within = group - (group_ends - num_groups)[expert]
    starts = ((token_ends - num_tokens)[expert] + within * BLOCK).clamp(max=rows)
    ends = torch.minimum(starts + BLOCK, token_ends[expert]).clamp(max=rows)
    return starts, torch.where(is_used, ends, starts)
