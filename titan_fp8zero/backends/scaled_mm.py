"""The `torch` backend: `torch._scaled_mm`, cuBLAS's blockwise FP8 GEMMs on SM90."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8zero.backends.backend import one_by_one
from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.transpose import rows_of
from titan_fp8zero.operands import ALIGNMENT, round_up, whole_rows

E4M3 = torch.float8_e4m3fn


def gemm_nt(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See `Backend`."""
    # cuBLAS reads rows of block scales 16 bytes apart and torch's check of their stride differs by
    # version: a multiple of 4 blocks along K suits both.
    groups = round_up(w_scale.shape[1], 4)
    w_scale = zero_pad(w_scale, w_scale.shape[0], groups).contiguous().t()
    return _scaled_mm(x_codes, x_scale, rows_of(w_codes), w_scale, groups, out_dtype)


def wgrad_nt(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See `Backend`."""
    groups = x_scale.shape[1]
    x_scale = zero_pad(x_scale, round_up(len(x_scale), ALIGNMENT), groups).t().contiguous()
    dy_codes, x_codes = whole_rows(dy_codes), whole_rows(x_codes)
    return _scaled_mm(dy_codes, dy_scale, x_codes, x_scale, groups, out_dtype)


def _scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: int, out_dtype: torch.dtype
) -> Tensor:
    """`A @ B.T` over `groups` groups of 128; pads and lays out all but `b_scale`, already done."""
    rows, cols = a.shape[0], b.shape[0]
    if 0 in (rows, cols, groups):
        return a.new_zeros((rows, cols), dtype=out_dtype)
    a = zero_pad(a, round_up(rows, ALIGNMENT), groups * BLOCK)
    b = zero_pad(b, round_up(cols, ALIGNMENT), groups * BLOCK)
    a_scale = zero_pad(a_scale, a.shape[0], groups).t().contiguous().t()  # column-major
    out = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)
    return out[:rows, :cols].to(out_dtype).contiguous()


def matmul_tn(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    """See `Backend`; on tensor cores."""
    with torch.autocast(dy.device.type, enabled=False):
        if dy.dtype == torch.bfloat16 and out_dtype == torch.float32:
            return torch.mm(dy.t(), x, out_dtype=torch.float32)
        return (dy.t() @ x).to(out_dtype)


def zero_pad(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """`matrix` with zeros below and to the right. Zero codes with zero scales add 0."""
    if matrix.shape == (rows, cols):
        return matrix
    padding = (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])
    if matrix.dtype == E4M3:  # F.pad has no float8 kernel
        return F.pad(matrix.view(torch.uint8), padding).contiguous().view(E4M3)
    return F.pad(matrix, padding).contiguous()


BACKEND = one_by_one(gemm_nt, wgrad_nt, matmul_tn)
