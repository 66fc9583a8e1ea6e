"""What every patch shares: version and signature checks, the refusal, and the mark of having
been applied."""

import inspect
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NoReturn

from torch.torch_version import TorchVersion

logger = logging.getLogger("torchtitan_patches")

TORCH = ((2, 11), (2, 14))
TORCHTITAN = ((0, 2, 2), (0, 3))
"""Versions that the patches were written for: from the first, before the second."""


def refuse(patch: str, changed: str) -> NoReturn:
    """Raises the error of a patch that does not fit what is installed."""
    raise RuntimeError(
        f"torchtitan_patches.{patch} refuses to apply: {changed}. Install a torch and a torchtitan "
        f"in the ranges that titan-fp8zero requires, or revise the patch "
        f"(torchtitan_patches/{patch}.py) for the new behaviour."
    )


def check_versions(patch: str) -> None:
    """Refuses unless torch and torchtitan are versions that the patches were written for."""
    for package, (first, end) in {"torch": TORCH, "torchtitan": TORCHTITAN}.items():
        installed: Any = TorchVersion(version(package))
        if not first <= installed < end:
            wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, end))}"
            refuse(patch, f"it was written for {package} {wanted}, and {installed} is installed")


def check_callable(
    patch: str, owner: Any, name: str, parameters: tuple[str, ...] | None
) -> Callable[..., Any]:
    """Returns `owner.name` if it takes exactly `parameters` (None for builtins, which tell no
    signature), and refuses otherwise."""
    found = getattr(owner, name, None)
    where = f"{owner.__name__}.{name}"
    if not callable(found):
        refuse(patch, f"{where} is gone")
    if parameters is not None:
        takes = tuple(inspect.signature(found).parameters)
        if takes != parameters:
            refuse(patch, f"{where} takes {takes} instead of {parameters}")
    return found


def is_applied(patch: str, function: Any) -> bool:
    """Whether `function` is the replacement that `patch` has put in place."""
    return getattr(function, "__torchtitan_patch__", None) == patch


def mark(patch: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks `function` as the replacement of `patch`."""
    function.__torchtitan_patch__ = patch  # type: ignore[attr-defined]
    return function


def log_applied(patch: str, what: str) -> None:
    """Names an applied patch in the log."""
    logger.info("applied patch %s: %s", patch, what)
