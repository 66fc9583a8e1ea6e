"""FP8 quantization and GEMMs as opaque ops, dense and grouped over experts.

Names follow DeepGEMM: `nt` multiplies `A @ B.T`, `tn` multiplies `A.T @ B`. Passing
`num_tokens_per_expert` makes an op grouped: the rows (tokens) are sorted by expert, and rows beyond
its sum belong to none. The recipe is DeepSeek-V3's (arXiv:2412.19437, section 3.3): activations and
gradients in 1x128 groups along the reduced dim, weights in 128x128 blocks.

Backends, chosen once a device by `choose_backend` and named in the log:
- `reference` dequantizes and multiplies in fp32, rounding once to the output's dtype; any device.
- `torch` is `torch._scaled_mm`, on Hopper GPUs (SM90).
"""

import functools
import logging
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_fp8zero import blocks
from titan_fp8zero.blocks import BLOCK, ScaleFormat
from titan_fp8zero.kernels.activation import (
    launch_quantize_columns,
    launch_quantize_rows,
    launch_quantize_rows_and_columns,
)

logger = logging.getLogger("titan_fp8zero")

BACKENDS = ("auto", "reference", "torch")
E4M3 = torch.float8_e4m3fn

# Every op here is opaque to torch.compile. Traced, Inductor's CPU loop splitting miscompiles the
# scale expansion, `codes * scale.repeat_interleave(128, -1)[:, :K]`: with K no multiple of 128 the
# last K % 128 columns are never computed. And only opaque do compiled runs equal eager to the bit.
_opaque = functools.partial(torch.library.custom_op, mutates_args=())


@functools.cache
def choose_backend(device: torch.device, requested: str = "auto") -> str:
    """The backend that multiplies on `device`; "auto" takes `torch` on SM90, else `reference`.

    Raises ValueError for an unknown name, RuntimeError for a backend that cannot run there.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {requested!r}")
    is_sm90 = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if requested == "torch" and not is_sm90:
        raise RuntimeError(
            "backend 'torch' multiplies 128x128-block FP8 on SM90 (H100, H200) only, and the "
            f"tensors are on {device}: use backend 'reference' or 'auto' there"
        )
    chosen = requested if requested != "auto" else "torch" if is_sm90 else "reference"
    logger.info("FP8 GEMM backend on %s: %s", device, chosen)
    return chosen


@_opaque("titan_fp8zero::quantize_weight")
def quantize_weight(weight: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`blocks.quantize_blockwise` as an op."""
    codes, scale_inv = blocks.quantize_blockwise(weight, cast(ScaleFormat, scale_format))
    return codes.contiguous(), scale_inv


@quantize_weight.register_fake
def _(weight, scale_format):
    scale_shape = blocks.scale_shape(tuple(weight.shape))
    return weight.new_empty(weight.shape, dtype=E4M3), weight.new_empty(
        scale_shape, dtype=torch.float32
    )


@_opaque("titan_fp8zero::quantize_rows")
def quantize_rows(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`blocks.quantize_rows` as an op: `[M, K]` -> codes `[M, K]`, scale_inv `[M, ceil(K/128)]`."""
    return blocks.quantize_rows(x, cast(ScaleFormat, scale_format))


quantize_rows.register_kernel("cuda", launch_quantize_rows)


@quantize_rows.register_fake
def _(x, scale_format):
    rows, cols = x.shape
    return x.new_empty((rows, cols), dtype=E4M3), x.new_empty(
        (rows, -(-cols // BLOCK)), dtype=torch.float32
    )


@_opaque("titan_fp8zero::quantize_columns")
def quantize_columns(
    x: Tensor, scale_format: str, num_tokens_per_expert: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize `[M, K]` in groups of 128 tokens, transposed: an operand of `fp8_wgrad_nt`.

    Returns codes e4m3 `[K, M]` and scale_inv fp32 `[K, ceil(M/128)]`. Grouped, each expert's groups
    start anew at its first token and follow those of the expert before; E experts have at most
    `M // 128 + E` groups, which is how many columns the scales then have.
    """
    columns = x.t()
    quantize = functools.partial(blocks.quantize_rows, scale_format=cast(ScaleFormat, scale_format))
    if num_tokens_per_expert is None:
        return quantize(columns)
    max_groups = x.shape[0] // BLOCK + num_tokens_per_expert.shape[0]
    codes = x.new_zeros(columns.shape, dtype=E4M3)
    scale = x.new_ones((x.shape[1], max_groups), dtype=torch.float32)
    for tokens, groups in _token_slices(num_tokens_per_expert, x.shape[0]):
        codes[:, tokens], scale[:, groups] = quantize(columns[:, tokens])
    return codes, scale


quantize_columns.register_kernel("cuda", launch_quantize_columns)


@quantize_columns.register_fake
def _(x, scale_format, num_tokens_per_expert=None):
    rows, cols = x.shape
    if num_tokens_per_expert is None:
        groups = -(-rows // BLOCK)
    else:
        groups = rows // BLOCK + num_tokens_per_expert.shape[0]
    return x.new_empty((cols, rows), dtype=E4M3), x.new_empty((cols, groups), dtype=torch.float32)


@_opaque("titan_fp8zero::quantize_rows_and_columns")
def quantize_rows_and_columns(
    x: Tensor, scale_format: str, num_tokens_per_expert: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `quantize_rows` and `quantize_columns` return, in one pass over x."""
    return (
        *quantize_rows(x, scale_format),
        *quantize_columns(x, scale_format, num_tokens_per_expert),
    )


quantize_rows_and_columns.register_kernel("cuda", launch_quantize_rows_and_columns)


@quantize_rows_and_columns.register_fake
def _(x, scale_format, num_tokens_per_expert=None):
    return (
        *quantize_rows(x, scale_format),
        *quantize_columns(x, scale_format, num_tokens_per_expert),
    )


@_opaque("titan_fp8zero::fp8_gemm_nt")
def fp8_gemm_nt(
    x_codes: Tensor,
    x_scale: Tensor,
    w_codes: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
    num_tokens_per_expert: Tensor | None = None,
) -> Tensor:
    """`[M, K]` in 1x128 groups times `[N, K]` in 128x128 blocks -> `[M, N]` of `out_dtype`.

    Forward as it is; dgrad with codes and scales of the weight transposed, which needs no
    requantizing because blocks are square. Grouped, the weight is `[E, N, K]` and rows that belong
    to no expert give zeros. Raises ValueError if K or the number of experts differ.
    """
    if x_codes.shape[-1] != w_codes.shape[-1]:
        raise ValueError(
            f"x has {x_codes.shape[-1]} features, the weight takes {w_codes.shape[-1]}"
        )
    gemm = _gemm_nt[choose_backend(x_codes.device, backend)]
    if num_tokens_per_expert is None:
        return gemm(x_codes, x_scale, w_codes, w_scale, out_dtype)
    if len(num_tokens_per_expert) != len(w_codes):
        raise ValueError(
            f"token counts of {len(num_tokens_per_expert)} experts, weights of {len(w_codes)}"
        )
    out = x_codes.new_zeros((x_codes.shape[0], w_codes.shape[1]), dtype=out_dtype)
    for expert, (tokens, _) in enumerate(_token_slices(num_tokens_per_expert, x_codes.shape[0])):
        out[tokens] = gemm(
            x_codes[tokens], x_scale[tokens], w_codes[expert], w_scale[expert], out_dtype
        )
    return out


@fp8_gemm_nt.register_fake
def _(x_codes, x_scale, w_codes, w_scale, out_dtype, backend, num_tokens_per_expert=None):
    return x_codes.new_empty((x_codes.shape[0], w_codes.shape[-2]), dtype=out_dtype)


@_opaque("titan_fp8zero::fp8_wgrad_nt")
def fp8_wgrad_nt(
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
    num_tokens_per_expert: Tensor | None = None,
) -> Tensor:
    """Weight gradient of two `quantize_columns` results, `[N, M]` times `[K, M]` -> `[N, K]`.

    Grouped: `[E, N, K]`, zeros for an expert without tokens.
    """
    wgrad = _wgrad_nt[choose_backend(x_codes.device, backend)]
    if num_tokens_per_expert is None:
        return wgrad(dy_codes, dy_scale, x_codes, x_scale, out_dtype)
    shape = _wgrad_shape(dy_codes.shape[0], x_codes.shape[0], num_tokens_per_expert)
    out = dy_codes.new_empty(shape, dtype=out_dtype)
    slices = _token_slices(num_tokens_per_expert, x_codes.shape[1])
    for expert, (tokens, groups) in enumerate(slices):
        out[expert] = wgrad(
            dy_codes[:, tokens],
            dy_scale[:, groups],
            x_codes[:, tokens],
            x_scale[:, groups],
            out_dtype,
        )
    return out


@fp8_wgrad_nt.register_fake
def _(dy_codes, dy_scale, x_codes, x_scale, out_dtype, backend, num_tokens_per_expert=None):
    shape = _wgrad_shape(dy_codes.shape[0], x_codes.shape[0], num_tokens_per_expert)
    return dy_codes.new_empty(shape, dtype=out_dtype)


@_opaque("titan_fp8zero::bf16_wgrad_tn")
def bf16_wgrad_tn(
    dy: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    out_dtype: torch.dtype,
    backend: str,
    num_tokens_per_expert: Tensor | None = None,
) -> Tensor:
    """Weight gradient of `dy` `[M, N]`, unquantized, and x `[M, K]`, dequantized to dy's dtype.

    Returns `[N, K]`; grouped `[E, N, K]`, zeros for an expert without tokens.
    """
    matmul = _matmul_tn[choose_backend(dy.device, backend)]
    if num_tokens_per_expert is None:
        return matmul(dy, blocks.dequantize_rows(x_codes, x_scale, dy.dtype), out_dtype)
    shape = _wgrad_shape(dy.shape[1], x_codes.shape[1], num_tokens_per_expert)
    out = dy.new_empty(shape, dtype=out_dtype)
    for expert, (tokens, _) in enumerate(_token_slices(num_tokens_per_expert, dy.shape[0])):
        x = blocks.dequantize_rows(x_codes[tokens], x_scale[tokens], dy.dtype)
        out[expert] = matmul(dy[tokens], x, out_dtype)
    return out


@bf16_wgrad_tn.register_fake
def _(dy, x_codes, x_scale, out_dtype, backend, num_tokens_per_expert=None):
    shape = _wgrad_shape(dy.shape[1], x_codes.shape[1], num_tokens_per_expert)
    return dy.new_empty(shape, dtype=out_dtype)


def _wgrad_shape(rows: int, cols: int, num_tokens_per_expert: Tensor | None) -> tuple[int, ...]:
    experts = () if num_tokens_per_expert is None else (num_tokens_per_expert.shape[0],)
    return *experts, rows, cols


def _token_slices(num_tokens_per_expert: Tensor, num_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Each expert's tokens, and its 128-token groups in the order of `quantize_columns`."""
    counts = num_tokens_per_expert.tolist()
    if sum(counts) > num_tokens:
        raise ValueError(f"experts were given {sum(counts)} tokens of {num_tokens}")
    token = group = 0
    for count in counts:
        num_groups = -(-count // BLOCK)
        yield slice(token, token + count), slice(group, group + num_groups)
        token += count
        group += num_groups


def _reference_matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    # Autocast reaches into ops and would multiply in bf16.
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float()).to(out_dtype)


def _reference_gemm_nt(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    x = blocks.dequantize_rows(x_codes, x_scale)
    return _reference_matmul(x, blocks.dequantize_blockwise(w_codes, w_scale).t(), out_dtype)


def _reference_wgrad_nt(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    dy = blocks.dequantize_rows(dy_codes, dy_scale)
    return _reference_matmul(dy, blocks.dequantize_rows(x_codes, x_scale).t(), out_dtype)


def _reference_matmul_tn(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    return _reference_matmul(dy.t(), x, out_dtype)


def _scaled_gemm_nt(
    x_codes: Tensor, x_scale: Tensor, w_codes: Tensor, w_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    # cuBLAS reads rows of block scales 16 bytes apart and torch's check of their stride differs by
    # version: a multiple of 4 blocks along K suits both.
    groups = _round_up(w_scale.shape[1], 4)
    w_scale = _zero_pad(w_scale, w_scale.shape[0], groups).t()
    return _scaled_mm(x_codes, x_scale, w_codes, w_scale, groups, out_dtype)


def _scaled_wgrad_nt(
    dy_codes: Tensor, dy_scale: Tensor, x_codes: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    groups = x_scale.shape[1]
    x_scale = _zero_pad(x_scale, _round_up(x_scale.shape[0], 16), groups).t().contiguous()
    return _scaled_mm(dy_codes, dy_scale, x_codes, x_scale, groups, out_dtype)


def _scaled_mm(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, groups: int, out_dtype: torch.dtype
) -> Tensor:
    """`A @ B.T` over `groups` groups of 128; pads and lays out all but `b_scale`, already done."""
    rows, cols = a.shape[0], b.shape[0]
    if 0 in (rows, cols, groups):
        return a.new_zeros((rows, cols), dtype=out_dtype)
    a = _zero_pad(a, _round_up(rows, 16), groups * BLOCK)
    b = _zero_pad(b, _round_up(cols, 16), groups * BLOCK)
    a_scale = _zero_pad(a_scale, a.shape[0], groups).t().contiguous().t()  # column-major
    out = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)
    return out[:rows, :cols].to(out_dtype).contiguous()


def _tensor_core_matmul_tn(dy: Tensor, x: Tensor, out_dtype: torch.dtype) -> Tensor:
    with torch.autocast(dy.device.type, enabled=False):
        if dy.dtype == torch.bfloat16 and out_dtype == torch.float32:
            return torch.mm(dy.t(), x, out_dtype=torch.float32)
        return (dy.t() @ x).to(out_dtype)


def _zero_pad(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """`matrix` with zeros below and to the right, row-major. Zero codes with zero scales add 0."""
    padding = (0, cols - matrix.shape[1], 0, rows - matrix.shape[0])
    if matrix.dtype == E4M3:  # F.pad has no float8 kernel
        return F.pad(matrix.view(torch.uint8), padding).contiguous().view(E4M3)
    return F.pad(matrix, padding).contiguous()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_gemm_nt = {"reference": _reference_gemm_nt, "torch": _scaled_gemm_nt}
_wgrad_nt = {"reference": _reference_wgrad_nt, "torch": _scaled_wgrad_nt}
_matmul_tn = {"reference": _reference_matmul_tn, "torch": _tensor_core_matmul_tn}
