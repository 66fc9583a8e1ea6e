"""Quantizing activations: 1x128 groups of rows, and 128x1 groups of columns, transposed.

The launches of the ops `quantize_rows`, `quantize_columns` and `quantize_rows_and_columns` in
`gemm.py`, which say what comes out. Values are multiplied by the reciprocal of their scale, as in
`blocks.quantize_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.kernels.quantize import is_ue8m0, magnitude_bits, scale_of
from titan_fp8zero.operands import empty_column_codes, empty_scale_inv

_BLOCK = tl.constexpr(BLOCK)
_WORDS = tl.constexpr(BLOCK // 4)
_NUM_WARPS_OF_ROWS, _NUM_WARPS_OF_COLUMNS = 8, 4

# Four codes in a word. Triton's own conversion leaves each in a register, to be shifted and merged.
_PACK = tl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)


# A program quantizes a tile of 128x128. Rows and columns load it each for themselves, spread over
# threads as they need it: the second time it comes from the first-level cache, and registers do not
# have to hold it. Offsets inside the tile are int32, those of its corner are scalars of int64.


@triton.jit
def _reciprocal_of(scale):
    """1 / scale, correctly rounded: an approximation and a Newton step, without a branch. Scales
    are normal, and so are their reciprocals; that of infinity is 0."""
    approximation = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [scale], dtype=tl.float32, is_pure=True, pack=1
    )
    excess = tl.fma(scale, approximation, -1.0)
    reciprocal = tl.fma(excess, approximation * -1.0, approximation)
    return tl.where(scale == float("inf"), 0.0, reciprocal)


@triton.jit
def _quantize_row_groups(
    x,
    codes,
    scale_inv,
    rows,
    cols,
    row_stride,
    code_stride,
    UE8M0: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """All pointers are those of the tile's corner."""
    i = tl.arange(0, _BLOCK)
    row, col = i[:, None], tl.arange(0, _BLOCK)[None, :]
    inside = (row < rows) & (col < cols)
    source, target = x + (row * row_stride + col), codes + (row * code_stride + col)
    values = tl.load(source) if IS_WHOLE else tl.load(source, mask=inside, other=0.0)
    values = values.to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(values), 1), UE8M0)
    quantized = (values * _reciprocal_of(scale)[:, None]).to(tl.float8e4nv)
    if IS_WHOLE:
        tl.store(target, quantized)
        tl.store(scale_inv + i, scale)
    else:
        tl.store(target, quantized, mask=inside)
        tl.store(scale_inv + i, scale, mask=i < rows)


@triton.jit
def _load_phase(x, phase: tl.constexpr, rows, cols, row_stride, IS_WHOLE: tl.constexpr):
    """Every fourth row of a tile, from row `phase`."""
    row = 4 * tl.arange(0, _WORDS)[:, None] + phase
    col = tl.arange(0, _BLOCK)[None, :]
    source = x + (row * row_stride + col)
    if IS_WHOLE:
        return tl.load(source).to(tl.float32)
    return tl.load(source, mask=(row < rows) & (col < cols), other=0.0).to(tl.float32)


@triton.jit
def _quantize_column_groups(
    x,
    codes,
    scale_inv,
    rows,
    cols,
    row_stride,
    words,
    words_per_column,
    UE8M0: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """`words` of each column are inside. All pointers are those of the tile's corner."""
    # The codes of four rows are the bytes of a word, which tl.trans moves whole. (Triton has
    # miscompiled transposes of FP8.)
    a = _load_phase(x, 0, rows, cols, row_stride, IS_WHOLE)
    b = _load_phase(x, 1, rows, cols, row_stride, IS_WHOLE)
    c = _load_phase(x, 2, rows, cols, row_stride, IS_WHOLE)
    d = _load_phase(x, 3, rows, cols, row_stride, IS_WHOLE)
    ab = tl.maximum(magnitude_bits(a), magnitude_bits(b))
    cd = tl.maximum(magnitude_bits(c), magnitude_bits(d))
    scale = scale_of(tl.max(tl.maximum(ab, cd), 0), UE8M0)
    j = tl.arange(0, _BLOCK)
    reciprocal = _reciprocal_of(scale)[None, :]
    packed = tl.inline_asm_elementwise(
        _PACK,
        "=r,r,r,r,r",
        [a * reciprocal, b * reciprocal, c * reciprocal, d * reciprocal],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    packed = tl.trans(packed)
    col, word = j[:, None], tl.arange(0, _WORDS)[None, :]
    target = codes + (col * words_per_column + word)
    if IS_WHOLE:
        tl.store(target, packed)
        tl.store(scale_inv + j, scale)
    else:
        tl.store(target, packed, mask=(col < cols) & (word < words))
        tl.store(scale_inv + j, scale, mask=j < cols)


@triton.jit(do_not_specialize=["num_experts"])
def _quantize_activation(
    x,
    row_codes,
    row_scale_inv,
    column_codes,
    column_scale_inv,
    expert_ends,
    num_experts,
    rows,
    cols,
    row_stride,
    row_scale_stride,
    column_scale_stride,
    words_per_column,
    UE8M0: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """128 columns of 128 tokens. What is None is left out. Column codes are words of four."""
    block, group = tl.program_id(0), tl.program_id(1)
    first_row, first_col = group.to(tl.int64) * _BLOCK, block.to(tl.int64) * _BLOCK
    rows_here = tl.minimum(rows - group * _BLOCK, _BLOCK)
    cols_here = tl.minimum(cols - block * _BLOCK, _BLOCK)
    x += first_row * row_stride + first_col
    if row_codes is not None:
        _quantize_row_groups(
            x,
            row_codes + (first_row * cols + first_col),
            row_scale_inv + (block.to(tl.int64) * row_scale_stride + first_row),
            rows_here,
            cols_here,
            row_stride,
            cols,
            UE8M0,
            IS_WHOLE,
        )
    if column_codes is not None:
        first_word = group * _WORDS
        words_here = words_per_column - first_word
        column_codes = column_codes.to(tl.pointer_type(tl.int32))
        if expert_ends is not None:
            # The expert of this group, as rows: from the last end before it to the next.
            expert = tl.arange(0, EXPERTS)
            ends = tl.load(expert_ends + expert, mask=expert < num_experts, other=0)
            ends = (ends + (_BLOCK - 1)) // _BLOCK * _BLOCK
            start = tl.max(tl.where(ends <= group * _BLOCK, ends, 0), 0)
            end = tl.min(tl.where(ends > group * _BLOCK, ends, rows + 1), 0)
            if end > rows:
                return
            column_codes += start.to(tl.int64) * cols // 4
            words_per_column = (end - start) // 4
            first_word -= start // 4
            words_here = _WORDS
        _quantize_column_groups(
            x,
            column_codes + (first_col * words_per_column + first_word),
            column_scale_inv + (group.to(tl.int64) * column_scale_stride + first_col),
            rows_here,
            cols_here,
            row_stride,
            words_here,
            words_per_column,
            UE8M0,
            IS_WHOLE,
        )


def launch_quantize_rows(x: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """`quantize_rows` by the kernel."""
    row_groups = _empty_row_groups(x)
    _launch(x, scale_format, row_groups=row_groups)
    return row_groups


def launch_quantize_columns(
    x: Tensor, scale_format: str, expert_ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_columns` by the kernel."""
    column_groups = _empty_column_groups(x, expert_ends)
    _launch(x, scale_format, column_groups=column_groups, expert_ends=expert_ends)
    return column_groups


def launch_quantize_rows_and_columns(
    x: Tensor, scale_format: str, expert_ends: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_rows_and_columns` by the kernel, which reads x once."""
    row_groups, column_groups = _empty_row_groups(x), _empty_column_groups(x, expert_ends)
    _launch(
        x, scale_format, row_groups=row_groups, column_groups=column_groups, expert_ends=expert_ends
    )
    return *row_groups, *column_groups


def _empty_row_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    return x.new_empty((rows, cols), dtype=torch.float8_e4m3fn), empty_scale_inv(x, rows, cols)


def _empty_column_groups(x: Tensor, expert_ends: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    is_grouped = expert_ends is not None
    return empty_column_codes(x, is_grouped), empty_scale_inv(x, cols, rows)


def _launch(
    x: Tensor,
    scale_format: str,
    *,
    row_groups: tuple[Tensor | None, Tensor | None] = (None, None),
    column_groups: tuple[Tensor | None, Tensor | None] = (None, None),
    expert_ends: Tensor | None = None,
) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, cols = x.shape
    row_codes, row_scale_inv = row_groups
    column_codes, column_scale_inv = column_groups
    grid = (triton.cdiv(cols, BLOCK), triton.cdiv(rows, BLOCK))
    if 0 in grid:
        return
    words_per_column = 0
    if column_codes is not None and column_codes.dim() == 2:
        words_per_column = column_codes.stride(0) // 4
    num_experts = 0 if expert_ends is None else len(expert_ends)
    _quantize_activation[grid](
        x,
        row_codes,
        row_scale_inv,
        None if column_codes is None else column_codes.view(torch.uint8),
        column_scale_inv,
        expert_ends,
        num_experts,
        rows,
        cols,
        x.stride(0),
        0 if row_scale_inv is None else row_scale_inv.stride(1),
        0 if column_scale_inv is None else column_scale_inv.stride(1),
        words_per_column,
        UE8M0=is_ue8m0(scale_format),
        IS_WHOLE=rows % BLOCK == 0 and cols % BLOCK == 0,
        EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=_NUM_WARPS_OF_ROWS if column_codes is None else _NUM_WARPS_OF_COLUMNS,
    )
