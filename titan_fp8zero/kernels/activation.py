"""Quantizing activations: 1x128 groups of a row, and 128x1 groups of a column, transposed.

The launches of the ops `quantize_rows` and `quantize_columns` in `gemm.py`, which say what comes
out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.quantize import codes_of, divisor_of, is_ue8m0, magnitude_bits, scale_of

_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(BLOCK // 4)
_ROW_WARPS = 8
_COLUMN_WARPS = 4


@triton.jit
def _quantize_rows(
    x, codes, scale_inv, rows, cols, row_stride, col_stride, groups, UE8M0: tl.constexpr
):
    group = tl.program_id(0)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    j = group * _BLOCK + tl.arange(0, _BLOCK)
    inside = (i[:, None] < rows) & (j[None, :] < cols)
    row = i[:, None].to(tl.int64)
    values = tl.load(x + row * row_stride + j[None, :] * col_stride, mask=inside, other=0.0)
    values = values.to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(values), 1), UE8M0)
    lift, divisor, reciprocal = divisor_of(scale)
    quantized = codes_of(values, lift[:, None], divisor[:, None], reciprocal[:, None])
    tl.store(codes + row * cols + j[None, :], quantized, mask=inside)
    tl.store(scale_inv + i.to(tl.int64) * groups + group, scale, mask=i < rows)


def launch_quantize_rows(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`quantize_rows` by the kernel: 128 rows of one group a program."""
    rows, cols = x.shape
    groups = triton.cdiv(cols, BLOCK)
    codes = x.new_empty((rows, cols), dtype=torch.float8_e4m3fn)
    scale_inv = x.new_empty((rows, groups), dtype=torch.float32)
    if codes.numel():
        _quantize_rows[(groups, triton.cdiv(rows, BLOCK))](
            x,
            codes,
            scale_inv,
            rows,
            cols,
            x.stride(0),
            x.stride(1),
            groups,
            UE8M0=is_ue8m0(scale_format),
            num_warps=_ROW_WARPS,
        )
    return codes, scale_inv


@triton.jit
def _load_rows(x, i, j, last, cols, row_stride, col_stride):
    inside = (i[:, None] < last) & (j[None, :] < cols)
    offsets = i[:, None].to(tl.int64) * row_stride + j[None, :] * col_stride
    return tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _codes_as_words(values, lift, divisor, reciprocal):
    codes = codes_of(values, lift[None, :], divisor[None, :], reciprocal[None, :])
    return codes.to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _quantize_columns(
    x,
    codes,
    scale_inv,
    group_starts,
    group_ends,
    rows,
    cols,
    row_stride,
    col_stride,
    groups,
    words_per_column,
    UE8M0: tl.constexpr,
    GROUPED: tl.constexpr,
    BY_WORDS: tl.constexpr,
):
    group = tl.program_id(1)
    if GROUPED:
        first = tl.load(group_starts + group).to(tl.int32)
        last = tl.load(group_ends + group).to(tl.int32)
    else:
        first = group * _BLOCK
        last = tl.minimum(first + _BLOCK, rows)
    # Every fourth token: its codes are the bytes of a word, which tl.trans moves whole. (Triton has
    # miscompiled transposes of FP8.)
    i = first + 4 * tl.arange(0, _WORDS)
    j = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    a = _load_rows(x, i, j, last, cols, row_stride, col_stride)
    b = _load_rows(x, i + 1, j, last, cols, row_stride, col_stride)
    c = _load_rows(x, i + 2, j, last, cols, row_stride, col_stride)
    d = _load_rows(x, i + 3, j, last, cols, row_stride, col_stride)
    ab = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    cd = tl.maximum(magnitude_bits(c), magnitude_bits(d))
    scale = scale_of(tl.max(tl.maximum(ab, cd), 0), UE8M0)
    column = j.to(tl.int64)
    tl.store(scale_inv + column * groups + group, scale, mask=j < cols)

    lift, divisor, reciprocal = divisor_of(scale)
    words = _codes_as_words(a, lift, divisor, reciprocal)
    words |= _codes_as_words(b, lift, divisor, reciprocal) << 8
    words |= _codes_as_words(c, lift, divisor, reciprocal) << 16
    words |= _codes_as_words(d, lift, divisor, reciprocal) << 24
    words = tl.trans(words)
    inside = j[:, None] < cols
    if BY_WORDS:
        word = group * _WORDS + tl.arange(0, _WORDS)[None, :]
        target = codes.to(tl.pointer_type(tl.int32)) + column[:, None] * words_per_column + word
        tl.store(target, words, mask=inside & (word < words_per_column))
    else:
        target = codes + column[:, None] * rows + i[None, :]
        tl.store(target, words.to(tl.uint8), mask=inside & (i[None, :] < last))
        tl.store(target + 1, (words >> 8).to(tl.uint8), mask=inside & (i[None, :] + 1 < last))
        tl.store(target + 2, (words >> 16).to(tl.uint8), mask=inside & (i[None, :] + 2 < last))
        tl.store(target + 3, (words >> 24).to(tl.uint8), mask=inside & (i[None, :] + 3 < last))


def launch_quantize_columns(
    x: Tensor, scale_format: str, num_tokens_per_expert: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_columns` by the kernel: 128 columns of one group a program.

    Grouped, counts stay on the device: tokens beyond x are left out without an error.
    """
    rows, cols = x.shape
    if num_tokens_per_expert is None:
        groups = triton.cdiv(rows, BLOCK)
        codes = x.new_empty((cols, rows), dtype=torch.float8_e4m3fn)
        starts = ends = None
    else:
        groups = rows // BLOCK + len(num_tokens_per_expert)
        codes = x.new_zeros((cols, rows), dtype=torch.float8_e4m3fn)
        starts, ends = _token_groups(num_tokens_per_expert, groups, rows)
    scale_inv = x.new_empty((cols, groups), dtype=torch.float32)
    if scale_inv.numel():
        _quantize_columns[(triton.cdiv(cols, BLOCK), groups)](
            x,
            codes.view(torch.uint8),
            scale_inv,
            starts,
            ends,
            rows,
            cols,
            x.stride(0),
            x.stride(1),
            groups,
            rows // 4,
            UE8M0=is_ue8m0(scale_format),
            GROUPED=starts is not None,
            BY_WORDS=starts is None and rows % 4 == 0,
            num_warps=_COLUMN_WARPS,
        )
    return codes, scale_inv


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
