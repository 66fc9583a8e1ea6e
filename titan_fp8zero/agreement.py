"""Ranks compare their layouts before the first collective that would hang if these differed."""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_fp8zero.layout import BucketLayout


def check_agreement(mesh: DeviceMesh, lines: Sequence[str]) -> None:
    """Raises RuntimeError, on every rank of a one-dimensional mesh, unless all have these lines.

    The error names the ranks that differ from the first one, and the first difference. A
    collective.
    """
    group = mesh.get_group()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[str] = [""] * mesh.size()
    dist.all_gather_object(digests, digest, group)
    if len(set(digests)) == 1:
        return
    all_lines: list[Sequence[str]] = [[]] * mesh.size()
    dist.all_gather_object(all_lines, lines, group)
    ranks = dist.get_process_group_ranks(group)
    differing = [i for i, other in enumerate(digests) if other != digests[0]]
    mine, theirs = next(
        (a, b)
        for a, b in zip_longest(all_lines[0], all_lines[differing[0]], fillvalue="nothing")
        if a != b
    )
    raise RuntimeError(
        f"ranks {[ranks[i] for i in differing]} have another model, config or layout than rank "
        f"{ranks[0]}. First difference: rank {ranks[0]} has {mine}; rank {ranks[differing[0]]} has "
        f"{theirs}. Start all ranks with the same config and the same versions."
    )


def describe_layouts(layouts: Iterable[BucketLayout]) -> list[str]:
    """A line a bucket, and a line a weight in it: what must be the same on all ranks."""
    lines = []
    for number, layout in enumerate(layouts):
        lines += [
            f"{member.weight.fqn} of {member.weight.units} units at {main.local_start}+"
            f"{member.start} in bucket {number}"
            for main in layout.mains
            for member in main.members
        ]
        kind = "FP8" if layout.is_fp8 else "high-precision"
        lines.append(f"{kind} bucket {number} of {layout.units_per_rank} units a rank")
    return lines
