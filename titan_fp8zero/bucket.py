"""A bucket's rank-major buffers as DTensors: one reduce-scatter in, one all-gather out.

Rows of the buffers are ranks, so that every main parameter, moment and gradient is a view of its
rank's row and one collective serves the whole bucket:

    gradient  [ranks, units_per_rank * unit | one "used" flag a member]   Partial -> BlockShard
    main      [units_per_rank, *unit]                                     this rank's units, fp32
    payload   [1, codes | scales | padding] bytes, or [1, values]         BlockShard -> Replicate
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from titan_fp8zero.blocks import BLOCK, TILE_NUMEL, ScaleFormat
from titan_fp8zero.kernels.fold import fold_add
from titan_fp8zero.kernels.quantize import quantize_tiles
from titan_fp8zero.kernels.update import update_tiles
from titan_fp8zero.layout import BucketLayout, MainLayout, Member, Run
from titan_fp8zero.lost_ranks import lost_ranks
from titan_fp8zero.operands import round_up
from titan_fp8zero.placement import BlockShard
from titan_fp8zero.ring import GradientRing

ROW_ALIGNMENT = 16
"""Elements, or bytes of a payload: kernels load 16 bytes at a time from any row."""
SCALE_BYTES = 4


def payload_row_bytes(units: int) -> int:
    """Bytes that a rank of an FP8 bucket publishes: its tiles' codes, their scales, padding."""
    return round_up(units * (TILE_NUMEL + SCALE_BYTES), ROW_ALIGNMENT)


class DataParallelMesh(NamedTuple):
    """The one-dimensional meshes over which a bucket is sharded, and replicated under HSDP."""

    shard: DeviceMesh | None
    replicate: DeviceMesh | None

    @property
    def num_ranks(self) -> int:
        return self.shard.size() if self.shard is not None else 1

    @property
    def rank(self) -> int:
        return self.shard.get_local_rank() if self.shard is not None else 0


class Precision(NamedTuple):
    """How a bucket rounds."""

    compute: torch.dtype
    """Of high-precision compute weights."""
    accumulate: torch.dtype
    """Of the gradient buffers."""
    reduce: torch.dtype
    """Of gradients on the wire."""
    scale_format: ScaleFormat
    round_main_to_bf16: bool
    """Round main parameters to bf16 before they are quantized."""


class Payload:
    """What main parameters publish: a view of their rank's part of the bucket's payload."""

    def __init__(
        self, codes_or_values: torch.Tensor, scale_inv: torch.Tensor | None, precision: Precision
    ) -> None:
        self._codes_or_values = codes_or_values
        self._scale_inv = scale_inv
        self._precision = precision
        self.is_fresh = False
        """Whether the payload was written from the present main parameters."""

    @torch.no_grad()
    def write(self, main: torch.Tensor) -> None:
        """Quantize (FP8) or cast (high-precision) the local units of a main parameter."""
        self.is_fresh = True
        if self._scale_inv is None:
            self._codes_or_values.copy_(main)
            return
        quantize_tiles(
            main,
            self._codes_or_values,
            self._scale_inv,
            self._precision.scale_format,
            self._precision.round_main_to_bf16,
        )

    def update_and_write(
        self,
        main: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        hyperparameters: torch.Tensor,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`update_tiles` on local tiles of FP8 main parameters, which writes them too."""
        assert self._scale_inv is not None, "high-precision parameters have no tiles"
        update_tiles(
            main,
            gradient,
            exp_avg,
            exp_avg_sq,
            self._codes_or_values,
            self._scale_inv,
            hyperparameters,
            *betas,
            eps,
            self._precision.scale_format,
            self._precision.round_main_to_bf16,
        )


class Gathered(NamedTuple):
    """The payloads of all ranks."""

    codes_or_values: torch.Tensor
    """`[ranks, units_per_rank, *unit]`."""
    scale_inv: torch.Tensor | None
    """fp32 `[ranks, units_per_rank]`, of an FP8 bucket."""


class ReducedGradient:
    """A rank's shard of the summed gradients of a bucket."""

    def __init__(self, units: torch.Tensor, flags: torch.Tensor, flag_of: dict[str, int]) -> None:
        self.units = units
        """`[units_per_rank, *unit]`."""
        self._flags = flags
        self._flag_of = flag_of
        self._counts: list[float] | None = None

    def is_used_by_any_rank(self, member: Member) -> bool:
        """Whether any rank had a gradient for a weight. Waits for the device."""
        if self._counts is None:
            self._counts = self._flags.tolist()
        return self._counts[self._flag_of[member.weight.fqn]] > 0


class Bucket:
    """The buffers of one bucket on this rank, and the collectives on them."""

    def __init__(
        self,
        layout: BucketLayout,
        mesh: DataParallelMesh,
        *,
        precision: Precision,
        ring: GradientRing,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self._ring = ring
        self.is_fp8 = layout.is_fp8
        self.precision = precision
        self._unit = (BLOCK, BLOCK) if layout.is_fp8 else ()
        self._unit_numel = TILE_NUMEL if layout.is_fp8 else 1
        self._units = layout.units_per_rank
        self._flag_of = {m.weight.fqn: index for index, m in enumerate(layout.members)}
        self.main = torch.zeros(self._units, *self._unit, dtype=torch.float32, device=device)
        self._gradient: torch.Tensor | None = None
        self._folded: set[int] = set()
        self._padding = [run for main in layout.mains for run in main.padding_runs()]
        self._reduction: torch.Tensor | None = None
        self._reducing: torch.Tensor | None = None
        self._is_scattered = False
        self._payload = self._empty_payload()
        self._sharded_payload = self._over_ranks(self._payload, BlockShard())
        self._gathering: torch.Tensor | None = None

    # Gradient: fold-accumulate, then one reduce-scatter.

    def accumulate(self, main: MainLayout, member: Member, gradient: torch.Tensor) -> None:
        """Add a weight's gradient, of the weight's shape."""
        if self._gradient is None:
            self._gradient = self._empty_gradient()
        index = self._flag_of[member.weight.fqn]
        is_first = index not in self._folded
        if self.is_fp8:
            rows = self._gradient_units(self._gradient)
            fold_add(rows[:, main.local], gradient, member.start, is_first)
        else:
            elements = gradient.reshape(-1)
            for run in main.runs(member):
                units = self._run_of(self._gradient, run)
                before = 0.0 if is_first else units
                torch.add(elements[run.start : run.start + run.units], before, out=units)
        self._folded.add(index)

    def start_reduce(self) -> None:
        """Start the reduce-scatter of what was accumulated; zeros where nothing was."""
        gradient = self._empty_gradient() if self._gradient is None else self._gradient
        self._flags(gradient).fill_(1)
        if len(self._folded) < len(self._flag_of):
            self._zero_unused(gradient)
        self._gradient = None
        self._folded.clear()
        wire = gradient.to(self.precision.reduce)
        partial = self._over_ranks(wire, Partial("sum"))
        if partial is None:
            self._reduction = wire  # the buffer itself, which is not lent again
            return
        reduced = partial.redistribute(placements=[BlockShard()], async_op=True)
        self._reduction = reduced.to_local()
        self._reducing = gradient
        self._ring.reducing(self)

    def wait_reduce(self) -> None:
        """Wait for the reduce-scatter and give the gradient buffer back; under HSDP, start the
        all-reduce of the shard."""
        if self._is_scattered:
            return
        assert self._reduction is not None, "start_reduce comes first"
        shard = self._wait(self._reduction, "reduce-scatter")
        if self._reducing is not None:
            self._ring.give_back(self, self._reducing)
            self._reducing = None
        if self.mesh.replicate is not None:
            partial = DTensor.from_local(
                shard, self.mesh.replicate, [Partial("sum")], run_check=False
            )
            replicated = partial.redistribute(placements=[Replicate()], async_op=True)
            shard = replicated.to_local()
        self._reduction, self._is_scattered = shard, True

    def finish_reduce(self) -> ReducedGradient:
        """Wait for all of the reduction."""
        self.wait_reduce()
        assert self._reduction is not None
        shard = self._wait(self._reduction, "all-reduce")
        self._reduction, self._is_scattered = None, False
        return ReducedGradient(self._gradient_units(shard)[0], self._flags(shard)[0], self._flag_of)

    def drop_gradient(self) -> None:
        """Forget what was accumulated; wait for a reduction under way."""
        if self._reduction is not None:
            self.finish_reduce()
        if self._gradient is not None:
            self._ring.give_back(self, self._gradient)
        self._gradient = None
        self._folded.clear()

    def _empty_gradient(self) -> torch.Tensor:
        """A buffer in which no member has a gradient yet: its units hold anything."""
        flags = round_up(len(self._flag_of), ROW_ALIGNMENT)
        columns = self._units * self._unit_numel + flags
        shape = (self.mesh.num_ranks, columns)
        gradient = self._ring.take(shape, self.precision.accumulate, self.main.device)
        self._zero(gradient, self._padding)
        return gradient

    def _zero_unused(self, gradient: torch.Tensor) -> None:
        for main in self.layout.mains:
            for member in main.members:
                index = self._flag_of[member.weight.fqn]
                if index not in self._folded:
                    self._flags(gradient)[:, index] = 0
                    self._zero(gradient, main.runs(member))

    def _zero(self, gradient: torch.Tensor, runs: Iterable[Run]) -> None:
        for run in runs:
            self._run_of(gradient, run).zero_()

    def _run_of(self, gradient: torch.Tensor, run: Run) -> torch.Tensor:
        units = self._gradient_units(gradient)
        return units[run.rank, run.local_start : run.local_start + run.units]

    def _gradient_units(self, gradient: torch.Tensor) -> torch.Tensor:
        units = gradient[:, : self._units * self._unit_numel]
        return units.view(len(gradient), self._units, *self._unit)

    def _flags(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[:, self._units * self._unit_numel :]

    # Publish: one all-gather.

    def payload(self, local: slice) -> Payload:
        """The view into which these local units are quantized or cast."""
        gathered = self._split_payload(self._payload)
        scale_inv = None if gathered.scale_inv is None else gathered.scale_inv[0, local]
        return Payload(gathered.codes_or_values[0, local], scale_inv, self.precision)

    def start_publish(self) -> None:
        """Start the all-gather of the payload."""
        if self._sharded_payload is None:
            self._gathering = self._payload
            return
        replicated = self._sharded_payload.redistribute(placements=[Replicate()], async_op=True)
        self._gathering = replicated.to_local()

    def finish_publish(self) -> Gathered:
        """Wait for the all-gather."""
        assert self._gathering is not None, "start_publish comes first"
        gathered = self._split_payload(self._wait(self._gathering, "all-gather"))
        self._gathering = None
        return gathered

    def _empty_payload(self) -> torch.Tensor:
        device = self.main.device
        if not self.is_fp8:
            return torch.zeros(1, self._units, dtype=self.precision.compute, device=device)
        row_bytes = payload_row_bytes(self._units)
        return torch.zeros(1, row_bytes, dtype=torch.uint8, device=device)

    def _split_payload(self, payload: torch.Tensor) -> Gathered:
        if not self.is_fp8:
            return Gathered(payload, None)
        code_bytes = self._units * TILE_NUMEL
        codes = payload[:, :code_bytes].view(torch.float8_e4m3fn)
        codes = codes.view(len(payload), self._units, BLOCK, BLOCK)
        scale_inv = payload[:, code_bytes : code_bytes + self._units * SCALE_BYTES]
        return Gathered(codes, scale_inv.view(torch.float32))

    def _over_ranks(self, local: torch.Tensor, placement: Placement) -> DTensor | None:
        """A rank's part of a tensor of all ranks; None if there is but one."""
        if self.mesh.shard is None or self.mesh.num_ranks == 1:
            return None
        return DTensor.from_local(local, self.mesh.shard, [placement], run_check=False)

    def _wait(self, tensor: torch.Tensor, collective: str) -> torch.Tensor:
        if not isinstance(tensor, AsyncCollectiveTensor):
            return tensor
        try:
            return tensor.wait()
        except RuntimeError as error:
            first, last = self.layout.members[0].weight.fqn, self.layout.members[-1].weight.fqn
            mesh = self.mesh.replicate if collective == "all-reduce" else self.mesh.shard
            assert mesh is not None
            lost = lost_ranks(mesh.get_group())
            raise RuntimeError(
                f"the {collective} of the bucket from {first} to {last} failed on rank "
                f"{dist.get_rank()}: {f'ranks {lost}' if lost else 'another rank'} died or did not "
                f"take part ({error})"
            ) from error
