"""Tests import TorchTitan as a run on this machine does: on CPUs patched, before anything else.

Kernels are imported before that, so that on CPUs Triton interprets them.
"""

import pytest
import torch

import torchtitan_patches

if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        import titan_fp8zero.kernels.activation
        import titan_fp8zero.kernels.fold
        import titan_fp8zero.kernels.unfold
        import titan_fp8zero.kernels.update  # noqa: F401
    torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)
