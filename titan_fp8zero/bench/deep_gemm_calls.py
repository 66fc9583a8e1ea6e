"""DeepGEMM as its own callers call it, on ready operands: SM90 only."""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_fp8zero import gemm

Operand = tuple[Tensor, Tensor]
"""Codes and their scales."""


def gemm_nt(rows: Operand, weight: Operand, counts: Tensor | None) -> Callable[[], Tensor]:
    """Rows `[M, K]` in 1x128 groups times a weight `[N, K]` or `[E, N, K]` in blocks, to bf16.

    `counts`, of each expert's rows, are multiples of 128.
    """
    import deep_gemm

    codes, scale_inv = rows
    a = (codes, _column_major(scale_inv))
    out = codes.new_empty((len(codes), weight[0].shape[-2]), dtype=torch.bfloat16)
    if counts is None:

        def run() -> Tensor:
            deep_gemm.fp8_gemm_nt(a, weight, out)
            return out

    else:
        experts = torch.arange(len(counts), dtype=torch.int32, device=codes.device)
        expert_of_row = experts.repeat_interleave(counts)

        def run() -> Tensor:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, weight, out, expert_of_row)
            return out

    return run


def wgrad_nt(dy: Tensor, x: Tensor, counts: Tensor | None) -> Callable[[], Tensor]:
    """dy `[M, N]` transposed times x `[M, K]`, both in 128x1 groups, added to fp32 `[N, K]`.

    With `counts`, which are all the same multiple of 128, to `[E, N, K]`.
    """
    import deep_gemm

    experts = () if counts is None else (len(counts),)
    out = dy.new_zeros((*experts, dy.shape[1], x.shape[1]), dtype=torch.float32)
    if counts is None:
        a, b = _columns(dy, 1), _columns(x, 1)

        def run() -> Tensor:
            deep_gemm.fp8_gemm_nt(a, b, out, c=out, recipe=(1, 1, 128))
            return out

    else:
        a, b = _columns(dy, len(counts)), _columns(x, len(counts))
        ks, ks_tensor = counts.tolist(), counts.int()

        def run() -> Tensor:
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, ks, ks_tensor, c=out)
            return out

    return run


def _columns(x: Tensor, experts: int) -> Operand:
    """Transposed codes, `[K, M]` of one expert after those of another; scales `[K, M/128]`."""
    codes, scale_inv = gemm.quantize_columns(x, "fp32")
    scale_inv = _column_major(scale_inv)
    if experts == 1:
        return codes, scale_inv
    by_expert = codes.view(len(codes), experts, -1).transpose(0, 1)
    return by_expert.contiguous().flatten(), scale_inv


def _column_major(scale_inv: Tensor) -> Tensor:
    return scale_inv.t().contiguous().t()
