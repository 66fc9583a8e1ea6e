"""How operands of GEMMs lie in memory: as DeepGEMM and cuBLAS load them, without another copy.

- Scales of 1x128 groups, fp32 `[M, groups]`, lie group by group, each group's M scales 16 bytes
  aligned: strides `(1, M rounded up to 4)`.
- Codes of columns, `[K, M]`, have rows of a multiple of 16 bytes, zero beyond M.
- Grouped, tokens of an expert begin at a multiple of 128 rows. Where they end is `expert_ends`,
  int32 `[E]`, DeepGEMM's "psum layout"; the rows from there to the next expert's first are zeros.
  Codes of columns lie expert by expert, each `[K, its rows]` with those zeros, flat.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_fp8zero.blocks import BLOCK

ALIGNMENT = 16
"""Bytes: of rows that the bulk copy engine (TMA) loads."""


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not less than `size`."""
    return -(-size // multiple) * multiple


def empty_scale_inv(like: Tensor, rows: int, cols: int) -> Tensor:
    """Scales for `rows` of `cols`, one for each 128 of these, on the device of `like`."""
    groups = -(-cols // BLOCK)
    return like.new_empty_strided(
        (rows, groups), (1, round_up(rows, ALIGNMENT // 4)), dtype=torch.float32
    )


def empty_column_codes(x: Tensor, is_grouped: bool) -> Tensor:
    """Codes for the columns of x `[M, K]`: `[K, M]`, or flat if grouped."""
    rows, cols = x.shape
    if is_grouped:
        return x.new_empty(rows * cols, dtype=torch.float8_e4m3fn)
    pitch = round_up(rows, ALIGNMENT)
    return x.new_empty((cols, pitch), dtype=torch.float8_e4m3fn)[:, :rows]


def whole_rows(column_codes: Tensor) -> Tensor:
    """Codes of columns `[K, M]`, with the zeros to which their rows are padded."""
    if column_codes.shape[1] == 0:
        return column_codes
    pitch = column_codes.stride(0)
    return column_codes.as_strided((len(column_codes), pitch), (pitch, 1))


def expert_rows(expert_ends: Tensor, num_rows: int) -> Iterator[slice]:
    """The rows of each expert's tokens. Waits for the device.

    Raises ValueError where they do not fit into `num_rows`.
    """
    ends = expert_ends.tolist()
    if ends and ends[-1] > num_rows:
        raise ValueError(f"experts' tokens end at row {ends[-1]} of {num_rows}")
    end = 0
    for next_end in ends:
        start = round_up(end, BLOCK)
        yield slice(start, next_end)
        end = next_end


def column_codes_of(codes: Tensor, rows: slice, cols: int) -> Tensor:
    """An expert's part of grouped column codes: `[K, its rows]`, each row padded to a multiple of
    128 by zeros."""
    padded = slice(rows.start, round_up(rows.stop, BLOCK))
    flat = codes[padded.start * cols : padded.stop * cols]
    return flat.view(cols, padded.stop - padded.start)[:, : rows.stop - rows.start]
