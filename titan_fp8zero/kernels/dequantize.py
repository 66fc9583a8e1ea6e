"""Dequantizing activations: codes in 1x128 groups times their scales."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.ops import define_op, fake_of

_BLOCK = tl.constexpr(BLOCK)
_NUM_WARPS = 8


@triton.jit
def _dequantize_rows(x, codes, scale_inv, rows, cols, scale_group_stride, IS_WHOLE: tl.constexpr):
    block, group = tl.program_id(0), tl.program_id(1)
    first_row, first_col = group.to(tl.int64) * _BLOCK, block.to(tl.int64) * _BLOCK
    rows_here = tl.minimum(rows - group * _BLOCK, _BLOCK)
    cols_here = tl.minimum(cols - block * _BLOCK, _BLOCK)
    i, j = tl.arange(0, _BLOCK), tl.arange(0, _BLOCK)[None, :]
    corner, offsets = first_row * cols + first_col, i[:, None] * cols + j
    scale_source = scale_inv + (block.to(tl.int64) * scale_group_stride + first_row) + i
    if IS_WHOLE:
        values = tl.load(codes + corner + offsets).to(tl.float32)
        values *= tl.load(scale_source)[:, None]
        tl.store(x + corner + offsets, values.to(x.dtype.element_ty))
    else:
        inside = (i[:, None] < rows_here) & (j < cols_here)
        values = tl.load(codes + corner + offsets, mask=inside).to(tl.float32)
        values *= tl.load(scale_source, mask=i < rows_here)[:, None]
        tl.store(x + corner + offsets, values.to(x.dtype.element_ty), mask=inside)


def launch_dequantize_rows(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize_rows` by the kernel."""
    rows, cols = codes.shape
    x = codes.new_empty((rows, cols), dtype=dtype)
    grid = (triton.cdiv(cols, BLOCK), triton.cdiv(rows, BLOCK))
    if 0 not in grid:
        _dequantize_rows[grid](
            x,
            codes,
            scale_inv,
            rows,
            cols,
            scale_inv.stride(1),
            IS_WHOLE=rows % BLOCK == 0 and cols % BLOCK == 0,
            num_warps=_NUM_WARPS,
        )
    return x


@define_op(cuda=launch_dequantize_rows)
def dequantize_rows(codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """`blocks.dequantize_rows` of contiguous codes `[M, K]` and scales as in `operands.py`."""
    return blocks.dequantize_rows(codes, scale_inv, dtype)


@fake_of(dequantize_rows)
def _(codes, scale_inv, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)
