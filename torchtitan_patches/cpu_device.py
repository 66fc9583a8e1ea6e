"""Lets TorchTitan run on CPUs: device type "cpu" and a device module with a memory API.

TorchTitan asks torch for an accelerator when it is imported, and takes "cuda" where there is
none. And `torch.cpu` lacks what TorchTitan calls on a device module: names and sizes of devices,
memory statistics, and a `current_device()` that is a number.
"""

import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils

from torchtitan_patches.guard import check_callable, check_versions, log_applied, refuse

NAME = "cpu_device"


class CpuDeviceModule(ModuleType):
    """`torch.cpu` with what TorchTitan expects of a device module besides.

    Memory is the resident memory of this process: its peak cannot be reset.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(name="cpu", total_memory=total)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":  # macOS counts bytes, others KiB
            peak *= 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def apply() -> None:
    """Imports TorchTitan with the CPU as its device."""
    if _torchtitan_is_on_cpu():
        return
    check_versions(NAME)
    if "torchtitan" in sys.modules:
        refuse(NAME, "torchtitan is imported already, and has chosen its device")
    device_type = check_callable(NAME, torch._utils, "_get_available_device_type", ())
    device_module = check_callable(NAME, torch._utils, "_get_device_module", ("device_type",))
    _import_torchtitan(device_type, device_module)
    if not _torchtitan_is_on_cpu():
        refuse(NAME, "torchtitan.tools.utils no longer asks torch._utils for its device")
    log_applied(NAME, "torchtitan's device is the CPU")


def _torchtitan_is_on_cpu() -> bool:
    utils = sys.modules.get("torchtitan.tools.utils")
    return isinstance(getattr(utils, "device_module", None), CpuDeviceModule)


def _import_torchtitan(device_type: Callable[..., Any], device_module: Callable[..., Any]) -> None:
    """TorchTitan binds the answers of both functions while it is imported, no later."""
    cpu = CpuDeviceModule("torchtitan_patches.cpu_device_module")
    utils: Any = torch._utils
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda name: cpu if name == "cpu" else device_module(name)
    try:
        import torchtitan.tools.utils  # noqa: F401
    finally:
        utils._get_available_device_type = device_type
        utils._get_device_module = device_module
