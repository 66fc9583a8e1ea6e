"""FP8 GEMMs of every backend that runs here, and linears, beside bf16, DeepGEMM and torchao."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8zero import gemm
from titan_fp8zero.backends import BACKENDS, choose_backend, is_sm90
from titan_fp8zero.bench import deep_gemm_calls
from titan_fp8zero.bench.linear import linear_rows
from titan_fp8zero.bench.measure import (
    even_expert_ends,
    gbytes,
    measure_machine,
    median_ms,
    this_device,
)
from titan_fp8zero.bench.report import Report, Row

BF16 = torch.bfloat16
NAMES = {BF16: "bf16", torch.float32: "fp32"}
PEERS = ("deep_gemm", "torchao")
"""Modules that are measured too, where they are installed and the GPU is SM90."""


class Size(NamedTuple):
    """Of x `[tokens, inputs]` times a weight `[outputs, inputs]`, transposed."""

    tokens: int
    outputs: int
    inputs: int
    experts: int = 0
    """Each with a weight and an even share of the tokens, a multiple of 128; 0 for one weight."""

    def __str__(self) -> str:
        experts = f", {self.experts} experts" if self.experts else ""
        return f"M={self.tokens} N={self.outputs} K={self.inputs}{experts}"

    @property
    def gflop(self) -> float:
        """Of one product."""
        return 2 * self.tokens * self.outputs * self.inputs / 1e9


class Sizes(NamedTuple):
    """Of all that is measured."""

    dense: Size
    experts: Size
    linear: Size


ON_GPU = Sizes(
    Size(4_096, 4_096, 7_168), Size(8_192, 2_048, 7_168, experts=8), Size(8_192, 14_336, 4_096)
)
ON_CPU = Sizes(Size(128, 128, 256), Size(256, 128, 128, experts=2), Size(128, 256, 128))


class Product(NamedTuple):
    """One of the three products of a linear, as operands that are ready to multiply."""

    name: str
    bf16: tuple[str, Tensor, Tensor]
    """The stock product, as it is written, and what `torch.matmul` multiplies for it."""
    op: Callable[..., Tensor]
    """Ours; takes `operands`, then dtype, backend and expert ends."""
    operands: tuple[Tensor, ...]
    deep_gemm: Callable[[], Callable[[], Tensor]]
    """Prepares a direct call."""


def bench_gemm(out: Path) -> None:
    """Prints, and writes `gemm.json` and `gemm.png`."""
    device = this_device()
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    peers = _peers(device)
    machine = measure_machine(device)
    rows = [
        *_gemm_rows("", sizes.dense, peers, device),
        *_gemm_rows("experts ", sizes.experts, peers, device),
        *linear_rows(*sizes.linear[:3], device, with_torchao="torchao" in peers),
    ]
    title = "; ".join(f"{name} {size}" for name, size in sizes._asdict().items())
    report = Report(f"GEMMs: {title}", machine, rows)
    report.print()
    for absent in sorted({*PEERS} - peers):
        print(f"not measured: {absent}, which is not installed or does not run here")
    report.write(out, "gemm")


def _peers(device: torch.device) -> set[str]:
    return {name for name in PEERS if is_sm90(device) and importlib.util.find_spec(name)}


def _backends(device: torch.device) -> Iterator[str]:
    """Those that multiply on a device."""
    for backend in BACKENDS:
        try:
            if choose_backend(device, backend) == backend:  # not "auto"
                yield backend
        except RuntimeError:
            continue


def _gemm_rows(prefix: str, size: Size, peers: set[str], device: torch.device) -> Iterator[Row]:
    """GEMMs on ready operands, and by itself the quantization that makes them ready."""

    def row(name: str, run: Callable[[], Tensor], read: tuple[Any, ...], peer: str = "") -> Row:
        moved, ms = gbytes(*read, run()), median_ms(run, device)
        return Row(prefix + name, ms, moved, size.gflop, peer and prefix + peer)

    x, dy, weight, ends = _tensors(size, device)
    backends = list(_backends(device))
    for name, (expression, *matrices), op, operands, deep_gemm in _products(x, dy, weight, ends):
        stock = peer = f"{name}, bf16 {expression}"
        yield row(stock, functools.partial(torch.matmul, *matrices), tuple(matrices))
        if "deep_gemm" in peers:
            run = deep_gemm()
            peer = f"{name}, DeepGEMM into {NAMES[run().dtype]}"
            yield row(peer, run, operands, stock)
        for backend in backends:
            run = functools.partial(op, *operands, BF16, backend, ends)
            yield row(f"{name}, FP8 by {backend}", run, operands, peer)
    x_rows = gemm.quantize_rows(x, "fp32")
    for backend in backends:  # beside the bf16 GEMM of wgrad, the last of the products
        run = functools.partial(gemm.bf16_wgrad_tn, dy, *x_rows, BF16, backend, ends)
        yield row(f"wgrad, bf16 by {backend}", run, (dy, *x_rows), stock)

    quantize_both = functools.partial(gemm.quantize_rows_and_columns, x, "fp32", ends)
    quantize_rows = functools.partial(gemm.quantize_rows, x, "fp32")
    for name, quantize in (("rows", quantize_rows), ("rows and columns", quantize_both)):
        ms = median_ms(quantize, device)
        yield Row(f"{prefix}quantize {name} of x", ms, gbytes(x, *quantize()))


def _tensors(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, dy, weight and expert ends."""
    tokens, outputs, inputs, experts = size
    randn = functools.partial(torch.randn, dtype=BF16, device=device)
    x, dy = randn(tokens, inputs), randn(tokens, outputs)
    if not experts:
        return x, dy, randn(outputs, inputs), None
    ends = even_expert_ends(experts, tokens, device)
    return x, dy, randn(experts, outputs, inputs), ends


def _products(x: Tensor, dy: Tensor, weight: Tensor, ends: Tensor | None) -> list[Product]:
    quantize = functools.partial(
        gemm.quantize_rows_and_columns, scale_format="fp32", expert_ends=ends
    )
    x_operands, dy_operands = quantize(x), quantize(dy)
    x_rows, x_columns = x_operands[:2], x_operands[2:]
    dy_rows, dy_columns = dy_operands[:2], dy_operands[2:]
    w = gemm.quantize_weight(weight, "fp32")
    w_t = (w[0].mT.contiguous(), w[1].mT.contiguous())
    stacked_x, stacked_dy = (a.view(*weight.shape[:-2], -1, a.shape[-1]) for a in (x, dy))
    return [
        Product(
            "forward",
            ("x @ w.t()", stacked_x, weight.mT),
            gemm.fp8_gemm_nt,
            (*x_rows, *w),
            lambda: deep_gemm_calls.gemm_nt(x_rows, w, ends),
        ),
        Product(
            "dgrad",
            ("dy @ w", stacked_dy, weight),
            gemm.fp8_gemm_nt,
            (*dy_rows, *w_t),
            lambda: deep_gemm_calls.gemm_nt(dy_rows, w_t, ends),
        ),
        Product(
            "wgrad",
            ("dy.t() @ x", stacked_dy.mT, stacked_x),
            gemm.fp8_wgrad_nt,
            (*dy_columns, *x_columns),
            lambda: deep_gemm_calls.wgrad_nt(dy_columns, x_columns, ends),
        ),
    ]
