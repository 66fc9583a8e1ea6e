"""Gives a gloo process group one worker thread in place of two, which corrupt the heap.

After each collective, its thread notes the name of it in a string that the group's threads share,
and takes no lock (`pgStatus_->lastCompletedWorkName` in `ProcessGroupGloo::runLoop`). Names of more
than 15 characters lie on the heap, as that of DTensor's all-gathers does, ALLGATHER_COALESCED: two
threads that end collectives at once free the same memory twice. The process dies later, in any
allocation ("malloc(): unaligned tcache chunk detected").

One thread runs collectives one after the other, in the order in which they were started. That has
to be the same on all ranks, as with other backends.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

from torchtitan_patches.guard import (
    check_callable,
    check_versions,
    is_applied,
    log_applied,
    mark,
    refuse,
)

NAME = "gloo_thread"

_OPTIONS = ("_devices", "_threads", "_timeout")


def apply() -> None:
    """Replaces what makes a `ProcessGroupGloo`: those made from then on have one thread."""
    gloo: Any = check_callable(NAME, c10d, "ProcessGroupGloo", parameters=None)
    stock_init = check_callable(NAME, gloo, "__init__", parameters=None)
    if is_applied(NAME, stock_init):
        return
    check_versions(NAME)
    check_callable(NAME, gloo, "create_device", parameters=None)
    check_callable(NAME, gloo, "create_default_device", parameters=None)
    make_options = check_callable(NAME, gloo, "_Options", parameters=None)
    if missing := [name for name in _OPTIONS if not hasattr(make_options, name)]:
        refuse(NAME, f"ProcessGroupGloo._Options lacks {', '.join(missing)}")

    def init(self: Any, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = make_options()
        options._devices = _devices(gloo)
        options._threads = 1
        options._timeout = timeout
        stock_init(self, store, rank, size, options)

    gloo.__init__ = mark(NAME, init)
    log_applied(NAME, "a gloo process group has one thread")


def _devices(gloo: Any) -> list[Any]:
    """Those of `ProcessGroupGloo` itself."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=interface) for interface in interfaces.split(",")]
