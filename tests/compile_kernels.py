"""Compiles kernels for Hopper GPUs without one: launches on CPU tensors end in PTX and a cubin."""

import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction, mangle_type

from titan_fp8zero.kernels.activation import (
    launch_quantize_columns,
    launch_quantize_rows_and_columns,
)
from titan_fp8zero.kernels.dequantize import launch_dequantize_rows
from titan_fp8zero.kernels.fold import launch_fold_add
from titan_fp8zero.kernels.quantize import launch_quantize_tiles
from titan_fp8zero.kernels.transpose import launch_transpose
from titan_fp8zero.kernels.unfold import launch_unfold_tiles, make_destinations
from titan_fp8zero.kernels.update import launch_update_tiles

HOPPER = GPUTarget("cuda", 90, 32)
E4M3 = torch.float8_e4m3fn
_ptx: list[str] = []


def compile_instead(
    kernel: JITFunction, *args: Any, grid: Any, warmup: bool, num_warps: int, **named: Any
) -> None:
    """In place of `JITFunction.run`: specializes as it does, and compiles."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | named
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        can_specialize = not parameter.do_not_specialize
        if (
            parameter.is_constexpr
            or value is None
            or (can_specialize and isinstance(value, int) and value == 1)
        ):
            signature[parameter.name], constants[(index,)] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0 and can_specialize:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    _ptx.append(compile_kernel(source, target=HOPPER, options={"num_warps": num_warps}).asm["ptx"])


def main() -> None:
    """Print the PTX of each launch, by name."""
    JITFunction.run = compile_instead
    found = {}
    for name, launch, args in launches():
        launch(*args)
        found[name] = _ptx.pop()
    print(json.dumps(found))


def launches() -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Of sizes as models have them."""
    bf16 = torch.bfloat16
    tiles = torch.zeros(4, 128, 128)
    payload = torch.zeros(4, 128, 128, dtype=E4M3), torch.zeros(4)
    gathered = torch.zeros(2, 4, 128, 128, dtype=E4M3), torch.zeros(2, 4)
    weight = torch.zeros(256, 512, dtype=E4M3)
    written = [torch.arange(8)], [weight], [torch.zeros(2, 4)]
    x = torch.zeros(256, 512, dtype=bf16)
    update = (tiles, tiles.to(bf16), tiles.clone(), tiles.clone(), *payload, torch.ones(4, 4))
    return [
        ("fold-accumulate", launch_fold_add, (torch.zeros(2, 4, 128, 128), x, 0)),
        ("fold", launch_fold_add, (torch.zeros(2, 4, 128, 128), x, 0, True)),
        ("quantize", launch_quantize_tiles, (tiles, *payload, "ue8m0", True)),
        ("update", launch_update_tiles, (*update, 0.9, 0.95, 1e-8, "fp32", False)),
        ("unfold", launch_unfold_tiles, (*gathered, *make_destinations(*written))),
        (
            "unfold both",
            launch_unfold_tiles,
            (*gathered, *make_destinations(*written, [weight.t().contiguous()])),
        ),
        ("activation", launch_quantize_rows_and_columns, (x, "fp32")),
        (
            "experts",
            launch_quantize_columns,
            (x, "fp32", torch.tensor([100, 256]).int()),
        ),
        ("dequantize", launch_dequantize_rows, (x.to(E4M3), torch.ones(4, 256).t(), bf16)),
        ("transpose", launch_transpose, (weight,)),
    ]


if __name__ == "__main__":
    main()
