"""Which ranks a failed collective lacks: those that do not say that they failed, too."""

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

REPORT_SECONDS = 3.0
"""How long ranks may differ in noticing a failure."""


def lost_ranks(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of a group that have died or hang. For a rank whose collective has failed.

    Every rank reports to the process group's store, and waits for the others. Empty where the
    store is lost, too, or all have reported.
    """
    waited_for = set(dist.get_process_group_ranks(group))
    try:
        store = dist.PrefixStore("titan_fp8zero/failed", _get_default_store())
        store.set(str(dist.get_rank()), "")
        deadline = time.monotonic() + REPORT_SECONDS
        while waited_for and time.monotonic() < deadline:
            waited_for -= {rank for rank in waited_for if store.check([str(rank)])}
            time.sleep(0.05)
    except RuntimeError:
        return []
    return sorted(waited_for)
