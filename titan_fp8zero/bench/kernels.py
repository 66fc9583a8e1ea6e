"""Every kernel, by its op, beside the copy bandwidth of the device and torch's fused AdamW."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from titan_fp8zero import gemm
from titan_fp8zero.bench.measure import (
    ADAMW_BYTES,
    even_expert_ends,
    fused_adamw_ms,
    gbytes,
    measure_machine,
    median_ms,
    this_device,
)
from titan_fp8zero.bench.report import Report, Row
from titan_fp8zero.blocks import BLOCK, num_tiles, scale_shape
from titan_fp8zero.kernels.dequantize import dequantize_rows
from titan_fp8zero.kernels.fold import fold_add
from titan_fp8zero.kernels.quantize import quantize_tiles
from titan_fp8zero.kernels.unfold import make_destinations, unfold_tiles
from titan_fp8zero.kernels.update import update_tiles

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
EXPERTS = 8
ADAMW = "AdamW(fused=True), fp32 gradient"


class Sizes(NamedTuple):
    """Where launches and caches no longer matter, or on a CPU what takes moments."""

    weight: tuple[int, int]
    """Whose tiles are updated and folded."""
    bucket: tuple[tuple[int, int], ...]
    """Weights that are unfolded in one launch."""
    activations: tuple[tuple[torch.dtype, int, int], ...]
    """`[M, K]`, M a multiple of 128 for each of `EXPERTS`."""


LLAMA3_8B_LAYER = (
    *((4_096, 4_096), (1_024, 4_096), (1_024, 4_096), (4_096, 4_096)),
    *((14_336, 4_096), (4_096, 14_336), (14_336, 4_096)),
)
ON_GPU = Sizes(
    weight=(65_536, 8_192),
    bucket=LLAMA3_8B_LAYER * 4,
    activations=((BF16, 8_192, 4_096), (BF16, 8_192, 14_336), (FP32, 8_192, 4_096)),
)
ON_CPU = Sizes(
    weight=(512, 1_024),
    bucket=((512, 512), (128, 512), (512, 512)),
    activations=((BF16, 1024, 128), (BF16, 1024, 256), (FP32, 1024, 128)),
)


def bench_kernels(out: Path) -> None:
    """Prints, and writes `kernels.json` and `kernels.png`."""
    device = this_device()
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    machine = measure_machine(device)
    rows = [
        *_update(sizes.weight, device),
        *_fold(sizes.weight, device),
        *_unfold(sizes.bucket, device),
        *(row for size in sizes.activations for row in _activations(*size, device)),
    ]
    weight = "{:,} x {:,}".format(*sizes.weight)
    report = Report(
        f"Kernels; tiles are those of a weight of {weight}, unfolded: of a bucket of "
        f"{len(sizes.bucket)} weights",
        machine,
        rows,
    )
    report.print()
    report.write(out, "kernels")


def _update(weight: tuple[int, int], device: torch.device) -> Iterator[Row]:
    tiles = num_tiles(weight)
    numel = tiles * BLOCK * BLOCK
    yield Row(ADAMW, fused_adamw_ms(numel, device), gbytes=ADAMW_BYTES * numel / 1e9)

    main = torch.randn(tiles, BLOCK, BLOCK, device=device)
    exp_avg, exp_avg_sq = torch.zeros_like(main), torch.zeros_like(main)
    quantized = torch.empty_like(main, dtype=gemm.E4M3), torch.empty(tiles, device=device)
    hyperparameters = torch.tensor([1 - 1e-5, 1e-4, 1.0, 1.0], device=device).repeat(tiles, 1)
    written = gbytes(main, exp_avg, exp_avg_sq, *quantized)
    for dtype in (FP32, BF16):
        gradient = torch.randn_like(main, dtype=dtype)
        tensors = main, gradient, exp_avg, exp_avg_sq
        update = functools.partial(
            update_tiles, *tensors, *quantized, hyperparameters, 0.9, 0.95, 1e-8, "fp32", False
        )
        yield Row(
            f"update and quantize, {NAMES[dtype]} gradient",
            median_ms(update, device),
            gbytes=gbytes(*tensors) + written,
            peer=ADAMW,
        )
    quantize = functools.partial(quantize_tiles, main, *quantized, "fp32", False)
    yield Row("quantize", median_ms(quantize, device), gbytes=gbytes(main, *quantized))


def _fold(weight: tuple[int, int], device: torch.device) -> Iterator[Row]:
    for source, target in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        gradient = torch.randn(weight, dtype=source, device=device)
        tiles = torch.zeros(1, num_tiles(weight), BLOCK, BLOCK, dtype=target, device=device)
        for name, is_first in (("fold-accumulate", False), ("fold", True)):
            yield Row(
                f"{name}, {NAMES[source]} into {NAMES[target]}",
                median_ms(functools.partial(fold_add, tiles, gradient, 0, is_first), device),
                gbytes=gbytes(gradient, *[tiles] * (2 - is_first)),
            )


def _unfold(weights: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Row]:
    tiles = [num_tiles(weight) for weight in weights]
    gathered = (
        _codes(1, sum(tiles), BLOCK, BLOCK, device=device),
        torch.ones(1, sum(tiles), device=device),
    )
    codes = [_codes(*weight, device=device) for weight in weights]
    transposed = [_codes(*weight[::-1], device=device) for weight in weights]
    scale_inv = [torch.ones(scale_shape(weight), device=device) for weight in weights]
    units = torch.arange(sum(tiles)).split(tiles)
    for name, copies in (("row-major", []), ("row-major and transposed", transposed)):
        destinations = make_destinations(units, codes, scale_inv, copies)
        yield Row(
            f"unfold, {name}",
            median_ms(functools.partial(unfold_tiles, *gathered, *destinations), device),
            gbytes=gbytes(*gathered, *codes, *scale_inv, *copies),
        )


def _activations(dtype: torch.dtype, rows: int, cols: int, device: torch.device) -> Iterator[Row]:
    x = torch.randn(rows, cols, dtype=dtype, device=device)
    ends = even_expert_ends(EXPERTS, rows, device)
    for name, quantize in (
        ("rows", functools.partial(gemm.quantize_rows, x, "fp32")),
        ("columns", functools.partial(gemm.quantize_columns, x, "fp32")),
        ("rows and columns", functools.partial(gemm.quantize_rows_and_columns, x, "fp32")),
        (
            f"columns, {EXPERTS} experts",
            functools.partial(gemm.quantize_columns, x, "fp32", ends),
        ),
    ):
        yield Row(
            f"quantize {name}, {NAMES[dtype]} {rows} x {cols}",
            median_ms(quantize, device),
            gbytes=gbytes(x, *quantize()),
        )
    quantized = gemm.quantize_rows(x, "fp32")
    dequantize = functools.partial(dequantize_rows, *quantized, dtype)
    name = f"dequantize rows, {NAMES[dtype]} {rows} x {cols}"
    yield Row(name, median_ms(dequantize, device), gbytes=gbytes(x, *quantized))


def _codes(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(gemm.E4M3)
