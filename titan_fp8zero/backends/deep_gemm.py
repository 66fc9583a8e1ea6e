"""The `deep_gemm` backend: DeepGEMM (github.com/deepseek-ai/DeepGEMM) on SM90.

Its kernels read rows of codes that are 16 bytes aligned, and write bf16; the one for weight
gradients adds to fp32. Dense weight gradients in bf16 are `torch._scaled_mm`'s, which writes them
without a detour through fp32, and is no less accurate.
"""

import deep_gemm
import torch
from torch import Tensor

from titan_fp8zero.backends import scaled_mm
from titan_fp8zero.backends.backend import Backend, one_by_one
from titan_fp8zero.backends.scaled_mm import zero_pad
from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.transpose import rows_of
from titan_fp8zero.operands import ALIGNMENT, expert_rows, round_up, whole_rows

_WGRAD_RECIPE = (1, 1, 128)
_MOST_EXPERTS_ONE_BY_ONE = 4
"""DeepGEMM's k-grouped kernel pairs blocks up to there, and hangs, or is wrong, where the blocks of
an expert are odd in number (deepseek-ai/DeepGEMM#415)."""


def _gemm_nt(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    rows, cols = len(x_codes), len(w_codes)
    x_codes, w_codes = _aligned_rows(x_codes), _aligned_rows(rows_of(w_codes))
    out = _empty_product(x_codes, rows, cols)
    deep_gemm.fp8_gemm_nt((x_codes, x_scale), (w_codes, w_scale), out)
    return out.to(out_dtype)


def _grouped_gemm_nt(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    expert_ends: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    rows, cols = len(x_codes), w_codes.shape[1]
    x_codes, w_codes = _aligned_rows(x_codes), _aligned_rows(rows_of(w_codes))
    out = _empty_product(x_codes, rows, cols)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (x_codes, x_scale), (w_codes, w_scale), out, expert_ends, use_psum_layout=True
    )
    return out.to(out_dtype)


def _wgrad_nt(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    if out_dtype != torch.float32:
        return scaled_mm.wgrad_nt(dy_codes, dy_scale, x_codes, x_scale, out_dtype)
    return _wgrad_fp32(whole_rows(dy_codes), dy_scale, whole_rows(x_codes), x_scale)


def _wgrad_fp32(dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor) -> Tensor:
    cols = len(x_codes)
    out = dy_codes.new_zeros((len(dy_codes), round_up(cols, ALIGNMENT // 4)), dtype=torch.float32)[
        :, :cols
    ]
    deep_gemm.fp8_gemm_nt(
        (dy_codes, dy_scale), (x_codes, x_scale), out, c=out, recipe=_WGRAD_RECIPE
    )
    return out.contiguous()


_dense_and_one_by_one = one_by_one(_gemm_nt, _wgrad_nt, scaled_mm.matmul_tn)


def _grouped_wgrad_nt(
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    expert_ends: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    experts = len(expert_ends)
    if experts <= _MOST_EXPERTS_ONE_BY_ONE:
        return _dense_and_one_by_one.grouped_wgrad_nt(
            dy_codes, dy_scale, x_codes, x_scale, expert_ends, out_dtype
        )
    rows, cols = len(dy_scale), len(x_scale)
    num_tokens = len(x_codes) // cols
    lengths = [round_up(r.stop, BLOCK) - r.start for r in expert_rows(expert_ends, num_tokens)]
    used = sum(lengths)
    out = dy_codes.new_zeros((experts, rows, cols), dtype=torch.float32)
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(
        (dy_codes[: used * rows], dy_scale[:, : used // BLOCK]),
        (x_codes[: used * cols], x_scale[:, : used // BLOCK]),
        out,
        lengths,
        torch.tensor(lengths, dtype=torch.int32, device=out.device),
        c=out,
    )
    return out.to(out_dtype)


def _grouped_matmul_tn(
    dy: Tensor, x: Tensor, expert_ends: Tensor, out_dtype: torch.dtype
) -> Tensor:
    # Rows between an expert's end and the next one's first are zeros, and may be multiplied too.
    ends = (expert_ends + (BLOCK - 1)) // BLOCK * BLOCK
    with torch.autocast(dy.device.type, enabled=False):
        return torch._grouped_mm(dy.t(), x, offs=ends.int()).to(out_dtype)


def _aligned_rows(codes: Tensor) -> Tensor:
    """Codes `[..., K]` with zeros up to the alignment: copied where K needs them."""
    missing = -codes.shape[-1] % ALIGNMENT
    if not missing:
        return codes
    rows = codes.reshape(-1, codes.shape[-1])
    padded = zero_pad(rows, len(rows), rows.shape[1] + missing)
    return padded.view(*codes.shape[:-1], -1)


def _empty_product(codes: Tensor, rows: int, cols: int) -> Tensor:
    pitch = round_up(cols, ALIGNMENT // 2)
    return codes.new_empty((rows, pitch), dtype=torch.bfloat16)[:, :cols]


BACKEND = Backend(
    _gemm_nt,
    _wgrad_nt,
    scaled_mm.matmul_tn,
    _grouped_gemm_nt,
    _grouped_wgrad_nt,
    _grouped_matmul_tn,
)
