"""What Triton's interpreter computes otherwise than a GPU, put right.

Its fused multiply-add rounds twice; its conversions to bf16 and e4m3 round halves up, lose carries
into the exponent, and cut subnormal results off. A GPU rounds once, to nearest even, and saturates.
It has no inline assembly: ours packs four e4m3 codes into a word, and approximates reciprocals.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from titan_fp8zero.blocks import E4M3_MAX


def fix(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round as a GPU does, and run kernels that were imported for it."""
    patch.setenv("TRITON_INTERPRET", "1")
    patch.setattr(InterpreterBuilder, "create_fma", _fma)
    patch.setattr(InterpreterBuilder, "create_inline_asm", _inline_asm)
    patch.setattr(InterpreterBuilder, "cast_impl", _cast)
    patch.setattr(InterpreterBuilder, "create_fp_to_fp", _cast)


def _fma(builder: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    # fp64 holds the product of two fp32 values exactly, and a quotient's remainder too.
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


_TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
"""The interpreter holds bf16 as uint16 and e4m3 as uint8."""


class _Results(NamedTuple):
    handle: TensorHandle

    def get_result(self, index: int) -> TensorHandle:
        return self.handle


def _inline_asm(builder: Any, asm: str, constraints: str, values: list, *others: Any) -> _Results:
    if asm.startswith("rcp.approx"):
        with np.errstate(divide="ignore"):
            return _Results(TensorHandle(np.float32(1) / values[0].data, tl.float32))
    assert asm.count("cvt.rn.satfinite.e4m3x2.f32") == 2, asm
    codes = [_cast(builder, value, tl.float8e4nv).data for value in values]
    words = np.stack(codes, axis=-1).view(np.int32)[..., 0]
    return _Results(TensorHandle(words, tl.int32))


_cast_others = InterpreterBuilder.cast_impl


def _cast(builder: Any, source: TensorHandle, to: Any, rounding: Any = None) -> TensorHandle:
    before, after = source.dtype.scalar, to.scalar
    if before not in _TORCH_DTYPES or after not in _TORCH_DTYPES:
        return _cast_others(builder, source, to)
    values = torch.from_numpy(np.ascontiguousarray(source.data))
    values = values.view(_TORCH_DTYPES[before]).float()
    if after == tl.float8e4nv:
        values = values.clamp(-E4M3_MAX, E4M3_MAX)
    converted = values.to(_TORCH_DTYPES[after])
    holder = {2: torch.uint16, 1: torch.uint8}.get(converted.element_size(), torch.float32)
    return TensorHandle(converted.view(holder).numpy(), after)
