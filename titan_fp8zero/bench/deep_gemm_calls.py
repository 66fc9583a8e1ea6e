"""DeepGEMM as its own callers call it, on ready operands: SM90 only."""

from collections.abc import Callable

import torch
from torch import Tensor

Operand = tuple[Tensor, Tensor]
"""Codes and their scales."""


def gemm_nt(rows: Operand, weight: Operand, expert_ends: Tensor | None) -> Callable[[], Tensor]:
    """Rows `[M, K]` in 1x128 groups times a weight `[N, K]` or `[E, N, K]` in blocks, to bf16."""
    import deep_gemm

    codes, _ = rows
    out = codes.new_empty((len(codes), weight[0].shape[-2]), dtype=torch.bfloat16)

    def run() -> Tensor:
        if expert_ends is None:
            deep_gemm.fp8_gemm_nt(rows, weight, out)
        else:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                rows, weight, out, expert_ends, use_psum_layout=True
            )
        return out

    return run


def wgrad_nt(dy: Operand, x: Operand, expert_ends: Tensor | None) -> Callable[[], Tensor]:
    """Columns of dy `[M, N]` times those of x `[M, K]`, added to fp32 `[N, K]` or `[E, N, K]`."""
    import deep_gemm

    shape = (len(dy[1]), len(x[1]))
    if expert_ends is None:
        out = dy[0].new_zeros(shape, dtype=torch.float32)

        def run() -> Tensor:
            deep_gemm.fp8_gemm_nt(dy, x, out, c=out, recipe=(1, 1, 128))
            return out

    else:
        out = dy[0].new_zeros((len(expert_ends), *shape), dtype=torch.float32)
        lengths = expert_ends.diff(prepend=torch.zeros_like(expert_ends[:1]))
        on_host = lengths.tolist()

        def run() -> Tensor:
            deep_gemm.k_grouped_fp8_gemm_nt_contiguous(dy, x, out, on_host, lengths, c=out)
            return out

    return run
