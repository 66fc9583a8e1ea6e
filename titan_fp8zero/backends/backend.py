"""What a backend multiplies. Operands are those of the ops in `gemm.py`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.operands import column_codes_of, expert_rows


@dataclass(frozen=True)
class Backend:
    """Products of FP8 operands: codes and scales by turns, then the dtype of the result.

    Grouped ones take `expert_ends` before it, and do not write rows that belong to no expert.
    """

    gemm_nt: Callable[..., Tensor]
    wgrad_nt: Callable[..., Tensor]
    matmul_tn: Callable[..., Tensor]
    """dy `[M, N]` and x `[M, K]`, not quantized."""
    grouped_gemm_nt: Callable[..., Tensor]
    grouped_wgrad_nt: Callable[..., Tensor]
    grouped_matmul_tn: Callable[..., Tensor]


def one_by_one(
    gemm_nt: Callable[..., Tensor],
    wgrad_nt: Callable[..., Tensor],
    matmul_tn: Callable[..., Tensor],
) -> Backend:
    """A backend that multiplies each expert's tokens on their own. Waits for the device."""

    def grouped_gemm_nt(
        x_codes: Tensor,
        x_scale: Tensor,
        w_codes: Tensor,
        w_scale: Tensor,
        expert_ends: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        out = x_codes.new_zeros((x_codes.shape[0], w_codes.shape[1]), dtype=out_dtype)
        for expert, rows in enumerate(expert_rows(expert_ends, len(x_codes))):
            out[rows] = gemm_nt(
                x_codes[rows], x_scale[rows], w_codes[expert], w_scale[expert], out_dtype
            )
        return out

    def grouped_wgrad_nt(
        dy_codes: Tensor,
        dy_scale: Tensor,
        x_codes: Tensor,
        x_scale: Tensor,
        expert_ends: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        shape = (len(expert_ends), len(dy_scale), len(x_scale))
        out = dy_codes.new_empty(shape, dtype=out_dtype)
        num_rows = len(x_codes) // len(x_scale)
        for expert, rows in enumerate(expert_rows(expert_ends, num_rows)):
            groups = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
            out[expert] = wgrad_nt(
                column_codes_of(dy_codes, rows, len(dy_scale)),
                dy_scale[:, groups],
                column_codes_of(x_codes, rows, len(x_scale)),
                x_scale[:, groups],
                out_dtype,
            )
        return out

    def grouped_matmul_tn(
        dy: Tensor, x: Tensor, expert_ends: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        out = dy.new_empty((len(expert_ends), dy.shape[1], x.shape[1]), dtype=out_dtype)
        for expert, rows in enumerate(expert_rows(expert_ends, len(dy))):
            out[expert] = matmul_tn(dy[rows], x[rows], out_dtype)
        return out

    return Backend(
        gemm_nt, wgrad_nt, matmul_tn, grouped_gemm_nt, grouped_wgrad_nt, grouped_matmul_tn
    )
