"""GEMM backends: which multiplies where, chosen once a device and named in the log.

- `deep_gemm` is DeepGEMM, on Hopper GPUs (SM90): the fastest.
- `torch` is `torch._scaled_mm`, there too; it multiplies experts one by one.
- `reference` dequantizes and multiplies in fp32, rounding once to the output's dtype; any device.
"""

import functools
import importlib
import importlib.util
import logging

import torch

from titan_fp8zero.backends.backend import Backend

logger = logging.getLogger("titan_fp8zero")

BACKENDS = ("auto", "reference", "torch", "deep_gemm")


@functools.cache
def choose_backend(device: torch.device, requested: str = "auto") -> str:
    """The backend that multiplies on `device`. "auto" takes, on SM90, `deep_gemm` where it is
    installed, else `torch`, and `reference` elsewhere.

    Raises ValueError for an unknown name, RuntimeError for a backend that cannot run there.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {requested!r}")
    if requested in ("torch", "deep_gemm") and not is_sm90(device):
        raise RuntimeError(
            f"backend {requested!r} multiplies 128x128-block FP8 on SM90 (H100, H200) only, and "
            f"the tensors are on {device}: use backend 'reference' or 'auto' there"
        )
    chosen = _automatic(device) if requested == "auto" else requested
    if chosen == "deep_gemm":
        from titan_fp8zero.backends.install import check_deep_gemm

        check_deep_gemm(device)
    logger.info("FP8 GEMM backend on %s: %s", device, chosen)
    return chosen


def is_sm90(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU, on which FP8 blocks are multiplied."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _automatic(device: torch.device) -> str:
    if not is_sm90(device):
        return "reference"
    return "deep_gemm" if importlib.util.find_spec("deep_gemm") else "torch"


@functools.cache
def backend_of(device: torch.device, requested: str) -> Backend:
    """The GEMMs of the backend that `choose_backend` names."""
    chosen = choose_backend(device, requested)
    module = {"torch": "scaled_mm"}.get(chosen, chosen)
    backend: Backend = importlib.import_module(f"{__name__}.{module}").BACKEND
    return backend
