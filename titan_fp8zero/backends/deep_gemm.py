"""The `deep_gemm` backend: DeepGEMM (github.com/deepseek-ai/DeepGEMM) on SM90.

Its kernels read rows of codes that are 16 bytes aligned and write multiples of 8 columns: other
sizes are padded with zeros. They write bf16; the one for weight gradients adds to fp32. Dense
weight gradients in bf16 are `torch._scaled_mm`'s, which writes them without a detour through fp32,
and is no less accurate.
"""

from collections.abc import Callable

import deep_gemm
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8zero.backends import scaled_mm
from titan_fp8zero.backends.backend import Backend, one_by_one
from titan_fp8zero.backends.scaled_mm import zero_pad
from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.transpose import rows_of
from titan_fp8zero.operands import ALIGNMENT, round_up, whole_rows

_Operand = tuple[Tensor, Tensor]
"""Codes and their scales."""
_COLUMNS = 8
"""Products have a multiple of these."""
_WGRAD_RECIPE = (1, 1, 128)
_WGRAD_ROWS = 64
"""At least: kernels for fewer do not compile."""
_LEAST_GROUPS = 5
"""Of the k-grouped kernel. With fewer it pairs blocks, and hangs or is wrong where those of a group
are odd in number (deepseek-ai/DeepGEMM#415)."""


def _gemm_nt(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return _product(deep_gemm.fp8_gemm_nt, (x_codes, x_scale), (w_codes, w_scale), out_dtype)


def _grouped_gemm_nt(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    expert_ends: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    def multiply(x: _Operand, weight: _Operand, out: Tensor) -> None:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            x, weight, out, expert_ends, use_psum_layout=True
        )

    return _product(multiply, (x_codes, x_scale), (w_codes, w_scale), out_dtype)


def _product(
    multiply: Callable[[_Operand, _Operand, Tensor], None],
    x: _Operand,
    weight: _Operand,
    out_dtype: torch.dtype,
) -> Tensor:
    """x `[M, K]` times a weight `[..., N, K]`, padded as the kernel needs them."""
    cols = weight[0].shape[-2]
    x, weight = (_padded_rows(x[0]), x[1]), (_padded_weight(weight[0]), weight[1])
    out = x[0].new_empty((len(x[0]), weight[0].shape[-2]), dtype=torch.bfloat16)
    multiply(x, weight, out)
    return out[:, :cols].to(out_dtype).contiguous()


def _wgrad_nt(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype != torch.float32:
        return scaled_mm.wgrad_nt(dy_codes, dy_scale, x_codes, x_scale, out_dtype)
    rows, cols = len(dy_codes), len(x_codes)
    dy, x = _padded_columns(dy_codes, dy_scale), _padded_columns(x_codes, x_scale)
    out = dy_codes.new_zeros((len(dy[0]), len(x[0])), dtype=torch.float32)
    deep_gemm.fp8_gemm_nt(dy, x, out, c=out, recipe=_WGRAD_RECIPE)
    return out[:rows, :cols].contiguous()


_dense_and_one_by_one = one_by_one(_gemm_nt, _wgrad_nt, scaled_mm.matmul_tn)


def _grouped_wgrad_nt(
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    expert_ends: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    experts, rows, cols = len(expert_ends), len(dy_scale), len(x_scale)
    if (_padded_size(rows), _padded_size(cols)) != (rows, cols):
        return _dense_and_one_by_one.grouped_wgrad_nt(
            dy_codes, dy_scale, x_codes, x_scale, expert_ends, out_dtype
        )
    groups = max(experts, _LEAST_GROUPS)
    ends = F.pad(_whole_blocks(expert_ends), (1, 0))
    lengths = F.pad(ends.diff(), (0, groups - experts))
    out = dy_codes.new_zeros((groups, rows, cols), dtype=torch.float32)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
        (dy_codes, dy_scale),
        (x_codes, x_scale),
        out,
        _even_lengths(len(x_codes) // cols, groups),
        lengths,
        c=out,
    )
    return out[:experts].to(out_dtype)


def _even_lengths(num_rows: int, groups: int) -> list[int]:
    # The kernel reads the lengths that are on the device. Those that it wants on the host, for
    # which we would have to wait, only have to add up, and help to choose its blocks.
    share, more = divmod(num_rows // BLOCK, groups)
    return [(share + (group < more)) * BLOCK for group in range(groups)]


def _whole_blocks(expert_ends: Tensor) -> Tensor:
    return ((expert_ends + (BLOCK - 1)) // BLOCK * BLOCK).int()


def _grouped_matmul_tn(
    dy: Tensor, x: Tensor, expert_ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    if dy.dtype != torch.bfloat16:  # which is all that the grouped kernel multiplies
        return _dense_and_one_by_one.grouped_matmul_tn(dy, x, expert_ends, out_dtype)
    rows, cols = dy.shape[1], x.shape[1]
    dy, x = (zero_pad(t, len(t), round_up(t.shape[1], _COLUMNS)) for t in (dy, x))
    # Rows between an expert's end and the next one's first are zeros, and may be multiplied too.
    with torch.autocast(dy.device.type, enabled=False):
        out = torch._grouped_mm(dy.t(), x, offs=_whole_blocks(expert_ends))
    return out[:, :rows, :cols].to(out_dtype).contiguous()


def _padded_rows(codes: Tensor) -> Tensor:
    """Codes `[M, K]` with rows of whole loads."""
    return zero_pad(codes, len(codes), round_up(codes.shape[1], ALIGNMENT))


def _padded_weight(codes: Tensor) -> Tensor:
    """Codes `[N, K]` or `[E, N, K]`, contiguous, that give products of whole columns."""
    codes = rows_of(codes)
    *experts, rows, cols = codes.shape
    padded = (round_up(rows, _COLUMNS), round_up(cols, ALIGNMENT))
    if padded == (rows, cols):
        return codes
    matrices = codes.view(-1, rows, cols)
    return torch.stack([zero_pad(matrix, *padded) for matrix in matrices]).view(*experts, *padded)


def _padded_columns(codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """An operand of weight gradients that gives products of whole columns and enough rows."""
    codes = whole_rows(codes)
    size = _padded_size(len(codes))
    return zero_pad(codes, size, codes.shape[1]), zero_pad(scale_inv, size, scale_inv.shape[1])


def _padded_size(size: int) -> int:
    return max(_WGRAD_ROWS, round_up(size, _COLUMNS))


BACKEND = Backend(
    _gemm_nt,
    _wgrad_nt,
    scaled_mm.matmul_tn,
    _grouped_gemm_nt,
    _grouped_wgrad_nt,
    _grouped_matmul_tn,
)
