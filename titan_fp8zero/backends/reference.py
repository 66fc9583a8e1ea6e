"""The reference backend: dequantizes, multiplies in fp32, rounds once. Any device."""

import torch
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.backends.backend import one_by_one


def _matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    # Autocast reaches into ops and would multiply in bf16.
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float()).to(out_dtype)


def _gemm_nt(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    x = blocks.dequantize_rows(x_codes, x_scale)
    return _matmul(x, blocks.dequantize_blockwise(w_codes, w_scale).t(), out_dtype)


def _wgrad_nt(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    dy = blocks.dequantize_rows(dy_codes, dy_scale)
    return _matmul(dy, blocks.dequantize_rows(x_codes, x_scale).t(), out_dtype)


def _matmul_tn(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    return _matmul(dy.t(), x, out_dtype)


BACKEND = one_by_one(_gemm_nt, _wgrad_nt, _matmul_tn)
