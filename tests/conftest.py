"""Tests import TorchTitan as a run on this machine does: on CPUs patched, before anything else."""

import torch

import torchtitan_patches

if not torch.cuda.is_available():
    torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)
