"""How long a function takes on a device, and how fast the device copies and multiplies."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ADAMW_BYTES = 28
"""Of an element, in fp32: weight, gradient and two moments read, all but the gradient written."""


@dataclass(frozen=True)
class Machine:
    """What figures are held against: measured in the same run."""

    name: str
    copy_gb_per_s: float
    """Of a device-to-device copy, bytes read and written."""
    gemm_tflop_per_s: float
    """Of a large square GEMM, in bf16 on GPUs and in fp32 on CPUs."""

    def __str__(self) -> str:
        return (
            f"{self.name}: copies {self.copy_gb_per_s:,.0f} GB/s, multiplies "
            f"{self.gemm_tflop_per_s:,.1f} TFLOP/s"
        )


def this_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def measure_machine(device: torch.device) -> Machine:
    """Copy bandwidth and GEMM rate of a device."""
    is_cuda = device.type == "cuda"
    return Machine(
        name=torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "CPU",
        copy_gb_per_s=_copy_gb_per_s(device, 1 << (30 if is_cuda else 26)),
        gemm_tflop_per_s=(
            _gemm_tflop_per_s(device, 8192, torch.bfloat16)
            if is_cuda
            else _gemm_tflop_per_s(device, 1024, torch.float32)
        ),
    )


def _copy_gb_per_s(device: torch.device, numel: int) -> float:
    source = torch.zeros(numel, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), device) / 1e6


def _gemm_tflop_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b, device) / 1e9


def median_ms(function: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of a call, after warm-up; on GPUs with a cold L2 cache."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=50, rep=300, return_mode="median")
    for _ in range(2):
        function()
    return statistics.median(_seconds(function) for _ in range(7)) * 1e3


def fused_adamw_ms(numel: int, device: torch.device) -> float:
    """A step of torch's AdamW on fp32 elements; it neither folds nor quantizes."""
    parameter = torch.zeros(numel, device=device, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    return median_ms(torch.optim.AdamW([parameter], fused=True).step, device)


def gbytes(*tensors: torch.Tensor) -> float:
    """What reading or writing each of them once moves, in 10^9 bytes."""
    return sum(tensor.nbytes for tensor in tensors) / 1e9


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def even_expert_ends(experts: int, tokens: int, device: torch.device) -> torch.Tensor:
    """The `expert_ends` of grouped ops: an even share of the tokens, a multiple of 128, each."""
    return torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (tokens // experts)
