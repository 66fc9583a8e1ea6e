"""Patches of TorchTitan and torch, one module each, applied only by name.

A patch module says in its docstring what it mends and why, and has one function, `apply()`. It
refuses loudly (`RuntimeError`) outside the versions it was written for and where the thing it
patches has changed; applied twice, it does nothing the second time.
"""

from collections.abc import Iterable
from importlib import import_module

PATCHES = (
    "cpu_device",
    "cpu_histc",
    "gloo_thread",
    "cpu_permute",
    "gloo_sum",
    "clip_grad_norm",
    "checkpoint_manager",
)
"""Every patch there is."""

CPU_PATCHES = ("cpu_device", "cpu_histc", "gloo_thread", "cpu_permute", "gloo_sum")
"""What TorchTitan's trainer needs to run on CPUs, in order: `cpu_device` has to come before the
first import of `torchtitan`, which the last two make."""


def apply(names: Iterable[str]) -> None:
    """Applies the named patches in the given order.

    Raises:
        ValueError: a name is not one of `PATCHES`; nothing is then applied.
        RuntimeError: a patch does not fit the installed torch or torchtitan.
    """
    names = list(names)
    if unknown := [name for name in names if name not in PATCHES]:
        raise ValueError(f"no such patch: {', '.join(unknown)}; there are: {', '.join(PATCHES)}")
    for name in names:
        import_module(f"{__name__}.{name}").apply()
