"""Main parameters: the weights of a model, re-laid as units of sharded, registered parameters."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from titan_fp8zero.blocks import TILE_NUMEL, fold, num_tiles, scale_shape, unfold
from titan_fp8zero.bucket import Bucket, Payload, Precision
from titan_fp8zero.compute_weight import FP8Weight, gradient_carrier
from titan_fp8zero.layout import MainLayout, Member, Run, WeightSpec
from titan_fp8zero.placement import BlockShard
from titan_fp8zero.weight_mesh import WeightMesh, local_shape, weight_mesh_of

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(eq=False)
class Weight:
    """A weight of the model: who reads it, and where its units live."""

    fqn: str
    readers: list[tuple[nn.Module, str]]
    """Several if the weight is tied."""
    parameter: nn.Parameter
    """The original one, then the main parameter."""
    is_fp8: bool
    mesh: WeightMesh
    placements: tuple[Placement, ...]
    """Of the original parameter, over the dims of its mesh; none if it was a plain tensor."""
    shape: tuple[int, ...]
    """Of the local weight: what one model-parallel rank holds whole."""
    main: "MainParameter" = field(init=False)
    member: Member = field(init=False)
    compute: FP8Weight | torch.Tensor = field(init=False)
    updates: int = 0
    """Optimizer steps in which the weight had a gradient."""

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad

    @property
    def leaf(self) -> torch.Tensor:
        """Where autograd delivers the gradient."""
        return self.compute.carrier if isinstance(self.compute, FP8Weight) else self.compute

    def to_units(self, local: torch.Tensor) -> torch.Tensor:
        """A local weight as units: tiles, or elements in a row."""
        return fold(local) if self.is_fp8 else local.reshape(-1)

    def from_units(self, units: torch.Tensor) -> torch.Tensor:
        """The local weight of these units: the inverse of `to_units`."""
        return unfold(units, self.shape) if self.is_fp8 else units.view(self.shape)

    def gather(self, units: torch.Tensor) -> torch.Tensor:
        """The local weight, of the units that this rank owns and those of the other data-parallel
        ranks, or of a moment in the same places. A collective."""
        runs = list(self.main.layout.runs(self.member))  # at most one of each rank, in their order
        mesh = self.main.bucket.mesh.shard
        if mesh is None:
            return self.from_units(units)
        padded = units.new_zeros(1, max(run.units for run in runs), *units.shape[1:])
        padded[0, : len(units)] = units
        sharded = DTensor.from_local(padded, mesh, [BlockShard()], run_check=False)
        gathered = sharded.redistribute(placements=[Replicate()]).to_local()
        return self.from_units(torch.cat([gathered[run.rank, : run.units] for run in runs]))

    # Views of weights refer to them. A copy of a view is one of the same weight; in another
    # process there is no such weight.

    def __deepcopy__(self, memo: Any) -> "Weight":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


@dataclass(eq=False)
class MainParameter:
    """A main parameter: the registered one, and the weights it holds."""

    layout: MainLayout
    bucket: Bucket
    owner: Any
    """The Zero1 that made it."""
    weights: list[Weight]
    parameter: nn.Parameter
    payload: Payload
    updates: int = 0
    """Optimizer steps in which any of the weights had a gradient."""

    def local(self, bucket_shard: torch.Tensor) -> torch.Tensor:
        """This main parameter's part of a rank's shard of the bucket."""
        return bucket_shard[self.layout.local]

    def refresh_payload(self) -> None:
        """Quantize or cast into the payload, unless the optimizer has done so in its update."""
        if not self.payload.is_fresh:
            self.payload.write(local_tensor(self.parameter.detach()))
        self.payload.is_fresh = False

    def owned_runs(self, weight: Weight) -> list[Run]:
        """The runs of a weight that this rank owns."""
        rank = self.bucket.mesh.rank
        return [run for run in self.layout.runs(weight.member) if run.rank == rank]


def main_of(parameter: torch.Tensor) -> MainParameter | None:
    """What `shard_zero1` knows of a main parameter; None for any other tensor."""
    return getattr(parameter, "_zero1_main", None)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def collect_weights(
    model: nn.Module, mesh: DeviceMesh | None, expert_mesh: DeviceMesh | None
) -> list[Weight]:
    """The weights of a model in forward (registration) order, tied ones once.

    Raises ValueError or TypeError that names a parameter which cannot be sharded, and why.
    """
    weights: dict[int, Weight] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fqn = clean_fqn(f"{module_name}.{name}" if module_name else name)
            is_fp8 = name in getattr(module, "fp8_weights", ())
            if id(parameter) in weights:
                _add_reader(weights[id(parameter)], fqn, is_fp8, module, name)
                continue
            _check_parameter(fqn, parameter)
            weight_mesh = weight_mesh_of(fqn, parameter, mesh, expert_mesh)
            shape = local_shape(fqn, parameter, weight_mesh)
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            weights[id(parameter)] = Weight(
                fqn, [(module, name)], parameter, is_fp8, weight_mesh, tuple(placements), shape
            )
    return list(weights.values())


def clean_fqn(fqn: str) -> str:
    """An FQN without what compilation and activation checkpointing put into it."""
    for prefix in _WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def _add_reader(weight: Weight, fqn: str, is_fp8: bool, module: nn.Module, name: str) -> None:
    if weight.is_fp8 != is_fp8:
        raise ValueError(
            f"{weight.fqn} and {fqn} are one tied parameter, but only one of them computes in FP8: "
            "convert both modules, or none"
        )
    weight.readers.append((module, name))


def _check_parameter(fqn: str, parameter: nn.Parameter) -> None:
    if main_of(parameter) is not None:
        raise ValueError(f"{fqn} is a main parameter already: shard_zero1 was called twice")
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{fqn} must be fp32, bf16 or fp16, got {parameter.dtype}")
    if parameter.numel() == 0:
        raise ValueError(f"{fqn} has no elements: shape {tuple(parameter.shape)}")


def weight_spec(weight: Weight, precision: Precision) -> WeightSpec:
    """A weight as the layout sees it."""
    numel = torch.Size(weight.shape).numel()
    return WeightSpec(
        fqn=weight.fqn,
        units=num_tiles(weight.shape) if weight.is_fp8 else numel,
        numel=numel,
        unit_bytes=precision.reduce.itemsize * (TILE_NUMEL if weight.is_fp8 else 1),
        num_ranks=weight.mesh.data_parallel.num_ranks,
        is_fp8=weight.is_fp8,
        group=(weight.mesh, weight.is_fp8, weight.trainable),
    )


@torch.no_grad()
def make_main_parameter(
    layout: MainLayout, bucket: Bucket, weights: list[Weight], owner: Any
) -> MainParameter:
    """Move weights, one gathered at a time, into a main parameter registered in their place."""
    tensor = weights[0].mesh.main_tensor(bucket.main[layout.local])
    parameter = nn.Parameter(tensor, requires_grad=weights[0].trainable)
    main = MainParameter(layout, bucket, owner, weights, parameter, bucket.payload(layout.local))
    parameter._zero1_main = main  # type: ignore[attr-defined]
    for weight, member in zip(weights, layout.members, strict=True):
        weight.main, weight.member = main, member
        units = weight.to_units(weight.mesh.gather(weight.parameter.detach()))
        for run in main.owned_runs(weight):
            local = bucket.main[run.local_start : run.local_start + run.units]
            local.copy_(units[run.start : run.start + run.units])
        weight.parameter = parameter
        for module, name in weight.readers:
            module.register_parameter(name, parameter)
    return main


def empty_compute_weight(
    weight: Weight, precision: Precision, keep_transposed: bool
) -> FP8Weight | torch.Tensor:
    """What forward will read once weights are published, with the leaf for its gradient."""
    device = weight.main.bucket.main.device
    if not weight.is_fp8:
        leaf = torch.zeros(weight.shape, dtype=precision.compute, device=device)
        return weight.mesh.compute_tensor(leaf).requires_grad_(weight.trainable)
    carrier = gradient_carrier(weight.shape, precision.compute, device)
    return FP8Weight(
        codes=_empty_codes(weight.shape, device),
        scale_inv=torch.ones(scale_shape(weight.shape), dtype=torch.float32, device=device),
        carrier=carrier.requires_grad_(weight.trainable),
        transposed=_empty_codes(_transposed(weight.shape), device) if keep_transposed else None,
        placements=tuple(placement for _, placement in weight.mesh.model_parallel),
    )


def _empty_codes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    *experts, rows, cols = shape
    return *experts, cols, rows
