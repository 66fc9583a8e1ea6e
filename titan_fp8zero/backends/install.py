"""Whether the installed `deep_gemm` runs with the installed torch."""

from importlib import metadata

import torch

KNOWN_TO_RUN = "sgl-deep-gemm==0.1.5 apache-tvm-ffi==0.1.11 with torch 2.11"
_PACKAGES = ("sgl-deep-gemm", "deep-gemm", "apache-tvm-ffi", "torch")


def check_deep_gemm(device: torch.device) -> None:
    """Multiplies once: some builds load and fail only then.

    Raises RuntimeError that says what is installed, and what to install.
    """
    try:
        from titan_fp8zero.backends.deep_gemm import BACKEND

        codes = torch.zeros(128, 128, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.ones(128, 1, device=device)
        BACKEND.gemm_nt(codes, scale, codes, scale[:1], torch.bfloat16)
    except Exception as error:
        raise RuntimeError(
            f"deep_gemm does not run here ({type(error).__name__}: {error}). Installed: "
            f"{', '.join(_installed())}. Known to run: {KNOWN_TO_RUN}, and nvcc on the "
            'PATH. Install that, or set [blockwise_fp8] gemm = "torch"'
        ) from error


def _installed() -> list[str]:
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return versions
