"""FP8 quantization and GEMMs as opaque ops, dense and grouped over experts.

Names follow DeepGEMM: `nt` multiplies `A @ B.T`, `tn` multiplies `A.T @ B`. Passing `expert_ends`
makes an op grouped. How operands lie in memory is said in `operands.py`; `backends` multiply them.
The recipe is DeepSeek-V3's (arXiv:2412.19437, section 3.3): activations and gradients in 1x128
groups along the reduced dim, weights in 128x128 blocks.
"""

import functools
from typing import cast

import torch
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.backends import backend_of
from titan_fp8zero.blocks import BLOCK, ScaleFormat
from titan_fp8zero.kernels.activation import (
    launch_quantize_columns,
    launch_quantize_rows,
    launch_quantize_rows_and_columns,
)
from titan_fp8zero.kernels.dequantize import dequantize_rows
from titan_fp8zero.operands import (
    column_codes_of,
    empty_column_codes,
    empty_scale_inv,
    expert_rows,
    whole_rows,
)
from titan_fp8zero.ops import define_op, fake_of

E4M3 = torch.float8_e4m3fn

# Every op here is opaque to torch.compile. Traced, Inductor's CPU loop splitting miscompiles the
# scale expansion, `codes * scale.repeat_interleave(128, -1)[:, :K]`: with K no multiple of 128 the
# last K % 128 columns are never computed. And only opaque do compiled runs equal eager to the bit.


@define_op()
def quantize_weight(weight: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`blocks.quantize_blockwise` as an op."""
    codes, scale_inv = blocks.quantize_blockwise(weight, cast(ScaleFormat, scale_format))
    return codes.contiguous(), scale_inv


@fake_of(quantize_weight)
def _(weight, scale_format):
    scale_shape = blocks.scale_shape(tuple(weight.shape))
    return weight.new_empty(weight.shape, dtype=E4M3), weight.new_empty(
        scale_shape, dtype=torch.float32
    )


@define_op(cuda=launch_quantize_rows)
def quantize_rows(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`blocks.quantize_rows` as an op: `[M, K]` -> codes `[M, K]`, scale_inv `[M, ceil(K/128)]`."""
    codes, scale_inv = blocks.quantize_rows(x, cast(ScaleFormat, scale_format))
    return codes, empty_scale_inv(x, *x.shape).copy_(scale_inv)


@fake_of(quantize_rows)
def _(x, scale_format):
    return x.new_empty(x.shape, dtype=E4M3), empty_scale_inv(x, *x.shape)


@define_op(cuda=launch_quantize_columns)
def quantize_columns(
    x: Tensor, scale_format: str, expert_ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize `[M, K]` in groups of 128 tokens, transposed: an operand of `fp8_wgrad_nt`.

    Returns codes e4m3 `[K, M]`, grouped flat, and scale_inv fp32 `[K, ceil(M/128)]`. Those of rows
    that belong to no expert are not written.
    """
    quantize = functools.partial(blocks.quantize_rows, scale_format=cast(ScaleFormat, scale_format))
    rows, cols = x.shape
    codes = empty_column_codes(x, expert_ends is not None)
    scale_inv = empty_scale_inv(x, cols, rows)
    if expert_ends is None:
        whole_rows(codes).view(torch.uint8).zero_()
        new_codes, new_scale_inv = quantize(x.t())
        codes.copy_(new_codes)
        scale_inv.copy_(new_scale_inv)
        return codes, scale_inv
    for own in expert_rows(expert_ends, rows):
        groups = slice(own.start // BLOCK, -(-own.stop // BLOCK))
        new_codes, scale_inv[:, groups] = quantize(x[own].t())
        own_codes = column_codes_of(codes, own, cols)
        whole_rows(own_codes).view(torch.uint8).zero_()
        own_codes.copy_(new_codes)
    return codes, scale_inv


@fake_of(quantize_columns)
def _(x, scale_format, expert_ends=None):
    rows, cols = x.shape
    return empty_column_codes(x, expert_ends is not None), empty_scale_inv(x, cols, rows)


@define_op(cuda=launch_quantize_rows_and_columns)
def quantize_rows_and_columns(
    x: Tensor, scale_format: str, expert_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `quantize_rows` and `quantize_columns` return, in one pass over x."""
    return *quantize_rows(x, scale_format), *quantize_columns(x, scale_format, expert_ends)


@fake_of(quantize_rows_and_columns)
def _(x, scale_format, expert_ends=None):
    return *quantize_rows(x, scale_format), *quantize_columns(x, scale_format, expert_ends)


@define_op()
def fp8_gemm_nt(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
    expert_ends: Tensor | None = None,
) -> Tensor:
    """`[M, K]` in 1x128 groups times `[N, K]` in 128x128 blocks -> `[M, N]` of `out_dtype`.

    Forward as it is; dgrad with codes and scales of the weight transposed, which needs no
    requantizing because blocks are square. Grouped, the weight is `[E, N, K]`, and rows that belong
    to no expert hold anything. Raises ValueError if K or the number of experts differ.
    """
    if x_codes.shape[-1] != w_codes.shape[-1]:
        raise ValueError(
            f"x has {x_codes.shape[-1]} features, the weight takes {w_codes.shape[-1]}"
        )
    multiply = backend_of(x_codes.device, backend)
    if expert_ends is None:
        return multiply.gemm_nt(x_codes, x_scale, w_codes, w_scale, out_dtype)
    if len(expert_ends) != len(w_codes):
        raise ValueError(f"tokens of {len(expert_ends)} experts, weights of {len(w_codes)}")
    return multiply.grouped_gemm_nt(x_codes, x_scale, w_codes, w_scale, expert_ends, out_dtype)


@fake_of(fp8_gemm_nt)
def _(x_codes, x_scale, w_codes, w_scale, out_dtype, backend, expert_ends=None):
    return x_codes.new_empty((x_codes.shape[0], w_codes.shape[-2]), dtype=out_dtype)


@define_op()
def fp8_wgrad_nt(
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
    expert_ends: Tensor | None = None,
) -> Tensor:
    """Weight gradient of two `quantize_columns` results, `[N, M]` times `[K, M]` -> `[N, K]`.

    Grouped: `[E, N, K]`, zeros for an expert without tokens.
    """
    operands = (dy_codes, dy_scale, x_codes, x_scale)
    multiply = backend_of(x_codes.device, backend)
    if expert_ends is None:
        return multiply.wgrad_nt(*operands, out_dtype)
    return multiply.grouped_wgrad_nt(*operands, expert_ends, out_dtype)


@fake_of(fp8_wgrad_nt)
def _(dy_codes, dy_scale, x_codes, x_scale, out_dtype, backend, expert_ends=None):
    shape = _wgrad_shape(dy_scale.shape[0], x_scale.shape[0], expert_ends)
    return dy_codes.new_empty(shape, dtype=out_dtype)


@define_op()
def bf16_wgrad_tn(
    dy: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
    expert_ends: Tensor | None = None,
) -> Tensor:
    """Weight gradient of `dy` `[M, N]`, unquantized, and x `[M, K]`, dequantized to dy's dtype.

    Returns `[N, K]`; grouped `[E, N, K]`, zeros for an expert without tokens.
    """
    x = dequantize_rows(x_codes, x_scale, dy.dtype)
    multiply = backend_of(dy.device, backend)
    if expert_ends is None:
        return multiply.matmul_tn(dy, x, out_dtype)
    return multiply.grouped_matmul_tn(dy, x, expert_ends, out_dtype)


@fake_of(bf16_wgrad_tn)
def _(dy, x_codes, x_scale, out_dtype, backend, expert_ends=None):
    shape = _wgrad_shape(dy.shape[1], x_codes.shape[1], expert_ends)
    return dy.new_empty(shape, dtype=out_dtype)


def _wgrad_shape(rows: int, cols: int, expert_ends: Tensor | None) -> tuple[int, ...]:
    experts = () if expert_ends is None else (expert_ends.shape[0],)
    return *experts, rows, cols
