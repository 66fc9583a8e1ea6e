"""Publishing: which all-gathers run when, and who waits for them.

A step starts the all-gathers of the first buckets in forward order, as soon as the optimizer has
updated them. Forward waits for a bucket before the first block that reads it, unfolds it, and
starts the next one: communication hides behind the rest of the update and the blocks before, and
only a few gathered payloads exist at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch._dynamo import OptimizedModule

from titan_fp8zero.bucket import Bucket
from titan_fp8zero.compute_weight import FP8Weight
from titan_fp8zero.kernels.unfold import Destinations, make_destinations, unfold_tiles
from titan_fp8zero.main_parameter import MainParameter, Weight, local_tensor

IN_FLIGHT = {"cuda": 4, "cpu": 1}
"""All-gathers under way at a time, by device. On CPUs, where ranks share the cores, more would hide
nothing, and two that end at once corrupt gloo's heap (torchtitan_patches/gloo_thread.py)."""


class Publisher:
    """Publishes the buckets of a model.

    Every rank starts and ends the all-gathers in the order that `publish` was given, whichever
    bucket it needs first: ranks whose forward skips a block (an unused expert) stay in step.
    """

    def __init__(
        self,
        model: nn.Module,
        mains_of: dict[Bucket, list[MainParameter]],
        *,
        overlap: bool,
    ) -> None:
        self._mains_of = mains_of
        self._overlap = overlap
        self._in_flight_limit = IN_FLIGHT[next(iter(mains_of)).main.device.type]
        self._to_start: list[Bucket] = []
        self._in_flight: list[Bucket] = []
        self._destinations = {
            bucket: _destinations_of(mains) if bucket.is_fp8 else _pieces_of(mains)
            for bucket, mains in mains_of.items()
        }
        if overlap:
            self._wait_before_readers(model)

    def publish_written(self, buckets: Sequence[Bucket]) -> None:
        """Start the first all-gathers of a `publish` to come, of payloads written already."""
        for bucket in buckets[len(self._in_flight) : self._in_flight_limit]:
            if not all(main.payload.is_fresh for main in self._mains_of[bucket]):
                return
            self._enqueue(bucket)

    def publish(self, buckets: Sequence[Bucket]) -> None:
        """Quantize or cast what the optimizer has not yet, and start the all-gathers."""
        for bucket in buckets[len(self._in_flight) :]:
            self._enqueue(bucket)
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Wait until every compute weight is fresh."""
        while self._in_flight:
            self._finish_next()

    def _wait_for(self, buckets: Iterable[Bucket]) -> None:
        if self._in_flight:
            for bucket in buckets:
                while bucket in self._in_flight or bucket in self._to_start:
                    self._finish_next()

    def _enqueue(self, bucket: Bucket) -> None:
        for main in self._mains_of[bucket]:
            main.refresh_payload()
        self._to_start.append(bucket)
        self._start_next()

    def _start_next(self) -> None:
        if self._to_start and len(self._in_flight) < self._in_flight_limit:
            bucket = self._to_start.pop(0)
            bucket.start_publish()
            self._in_flight.append(bucket)

    @torch.no_grad()
    def _finish_next(self) -> None:
        bucket = self._in_flight.pop(0)
        gathered = bucket.finish_publish()
        self._start_next()
        destinations = self._destinations[bucket]
        if isinstance(destinations, Pieces):
            destinations.take(gathered.codes_or_values)
        else:
            unfold_tiles(*gathered, *destinations)

    def _wait_before_readers(self, model: nn.Module) -> None:
        readers: dict[nn.Module, dict[Bucket, None]] = {}
        for bucket, mains in self._mains_of.items():
            for main in mains:
                for weight in main.weights:
                    for module, _ in weight.readers:
                        readers.setdefault(module, {})[bucket] = None
        blocks: dict[nn.Module, dict[Bucket, None]] = {}
        for module, block in _blocks_of(model, readers).items():
            blocks.setdefault(block, {}).update(readers[module])
        for block, buckets in blocks.items():
            block.register_forward_pre_hook(self._waiting_hook(tuple(buckets)))

    def _waiting_hook(self, buckets: tuple[Bucket, ...]) -> Callable[..., None]:
        # Inside a compiled region it would be traced, and never run again: then it breaks the
        # graph instead, which is slow but right. Compile first, and it stays outside.
        @torch.compiler.disable(reason="compile the model before shard_zero1, or overlap=False")
        def wait(module: nn.Module, args: Any) -> None:
            self._wait_for(buckets)

        return wait


class Pieces(NamedTuple):
    """Where the values of a high-precision bucket go: compute weights, which keep their
    addresses."""

    sizes: list[int]
    """Of the pieces into which the values of all ranks, end to end, are cut."""
    indices: list[int]
    """Pieces that are no padding."""
    targets: list[torch.Tensor]

    def take(self, values: torch.Tensor) -> None:
        """Copy the pieces of values `[ranks, units_per_rank]` to their places, in one launch."""
        pieces = values.view(-1).split(self.sizes)
        torch._foreach_copy_(self.targets, [pieces[index] for index in self.indices])


def _pieces_of(mains: list[MainParameter]) -> Pieces:
    layout = mains[0].bucket.layout
    targets: dict[int, torch.Tensor] = {}
    for weight in (weight for main in mains for weight in main.weights):
        assert isinstance(weight.compute, torch.Tensor)
        values = local_tensor(weight.compute.detach()).view(-1)
        for run in weight.main.layout.runs(weight.member):
            first = run.rank * layout.units_per_rank + run.local_start
            targets[first] = values[run.start : run.start + run.units]
    sizes, indices, end = [], [], 0
    for first in sorted(targets):
        if first > end:
            sizes.append(first - end)
        indices.append(len(sizes))
        sizes.append(len(targets[first]))
        end = first + len(targets[first])
    sizes.append(layout.num_ranks * layout.units_per_rank - end)
    return Pieces(sizes, indices, [targets[first] for first in sorted(targets)])


def _destinations_of(mains: list[MainParameter]) -> Destinations:
    """Where the tiles of an FP8 bucket go: compute weights, which keep their addresses."""
    weights = [weight for main in mains for weight in main.weights]
    computes = [weight.compute for weight in weights if isinstance(weight.compute, FP8Weight)]
    return make_destinations(
        [_units_of(weight) for weight in weights],
        [compute.codes for compute in computes],
        [compute.scale_inv for compute in computes],
        [compute.transposed for compute in computes if compute.transposed is not None],
    )


def _units_of(weight: Weight) -> torch.Tensor:
    """Which units of the bucket, counted rank by rank, are the tiles of a weight."""
    units_per_rank = weight.main.bucket.layout.units_per_rank
    runs = weight.main.layout.runs(weight.member)
    return torch.cat(
        [run.rank * units_per_rank + run.local_start + torch.arange(run.units) for run in runs]
    )


def _blocks_of(model: nn.Module, readers: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The block of each reader: the outermost module below the root that has a forward.

    Not the reader itself: a module may read its children's weights without calling them. The root
    where it is compiled as a whole, or a block in place: its children's hooks would be traced.
    """
    wanted, found = set(readers), {}

    def visit(module: nn.Module, block: nn.Module | None) -> None:
        if module in wanted and module not in found:
            found[module] = block or model
        for child in module.children():
            visit(child, block or _as_block(child, model))

    visit(model, model if _is_compiled(model) or _is_compiled_in_place(model) else None)
    return found


def _as_block(module: nn.Module, model: nn.Module) -> nn.Module | None:
    if _is_compiled_in_place(module):
        return model
    has_forward = type(module).forward is not nn.Module.forward
    return module if has_forward else None


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule)


def _is_compiled_in_place(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None
