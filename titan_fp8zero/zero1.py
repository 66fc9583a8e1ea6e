"""`shard_zero1`: registers main parameters, and says when gradients are reduced and weights published."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_fp8zero.blocks import SCALE_FORMATS, TILE_NUMEL, ScaleFormat, fold, num_tiles, unfold
from titan_fp8zero.blocks import scale_shape as scale_shape_of
from titan_fp8zero.bucket import Bucket, DataParallelMesh, Payload, Precision, ReducedGradient
from titan_fp8zero.compute_weight import FP8Weight, gradient_carrier, reader_class
from titan_fp8zero.layout import MainLayout, Member, Strategy, WeightSpec, plan_buckets
from titan_fp8zero.norm import clip_factor, total_norm
from titan_fp8zero.placement import BlockShard

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(eq=False)
class _Weight:
    """A weight of the model: who reads it, and where its units live."""

    fqn: str
    readers: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    is_fp8: bool
    mesh: "_WeightMesh"
    shape: tuple[int, ...]
    """Of the local weight: what one model-parallel rank holds whole."""
    main: "_Main" = field(init=False)
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
        return fold(local) if self.is_fp8 else local.reshape(-1)


@dataclass(frozen=True)
class _WeightMesh:
    """The mesh of a main parameter, and which dims of it are data-parallel."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    """Of the main parameter, over all dims of `mesh`."""
    data_parallel: DataParallelMesh
    model_parallel: tuple[tuple[str, Placement], ...]
    """Dims that stay sharded in the compute weight (EP), and their placement there."""

    def main_tensor(self, local: torch.Tensor) -> torch.Tensor:
        """Wrap a rank's units as the sharded tensor they are part of."""
        if self.mesh is None:
            return local
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)


@dataclass(eq=False)
class _Main:
    """A main parameter: the registered one, and the weights it holds."""

    layout: MainLayout
    bucket: Bucket
    owner: "Zero1"
    weights: list[_Weight]
    parameter: nn.Parameter
    payload: Payload
    updates: int = 0

    def local(self, bucket_shard: torch.Tensor) -> torch.Tensor:
        """This main parameter's part of a rank's shard of the bucket."""
        start = self.layout.local_start
        return bucket_shard[start : start + self.layout.units_per_rank]


def main_of(parameter: torch.Tensor) -> _Main | None:
    """What `shard_zero1` knows of a main parameter; None for any other tensor."""
    return getattr(parameter, "_zero1_main", None)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Zero1:
    """What `shard_zero1` returns: attach optimizers to it, clip with it, publish through it."""

    def __init__(
        self,
        model: nn.Module,
        weights: list[_Weight],
        precision: Precision,
        *,
        strategy: Strategy,
        bucket_bytes: int,
        padding_limit: float,
        backwards_per_step: int,
    ) -> None:
        self.backwards_per_step = backwards_per_step
        self.skipped_steps = 0
        """Steps that all ranks skipped because the gradient norm was not finite."""
        self._weights = weights
        self._requires_gradient_sync = True
        self._optimizers: list[torch.optim.Optimizer] = []
        self._layouts = plan_buckets(
            [_weight_spec(weight, precision) for weight in weights],
            strategy=strategy,
            bucket_bytes=bucket_bytes,
            padding_limit=padding_limit,
        )
        self._buckets: list[Bucket] = []
        self._mains: list[_Main] = []
        self._make_buckets(precision)
        # Backward meets the last modules first: their buckets are complete, and reduced, first.
        self._reduce_order = [
            bucket for bucket in reversed(self._buckets) if self._is_trainable(bucket)
        ]
        self._reset_backwards()
        self._reset_step()
        self._bind_compute_weights(precision)
        self._refuse_apply(model)
        self.publish_all()
        model.register_load_state_dict_post_hook(lambda module, keys: self.publish_all())

    # Making main parameters.

    @property
    def layouts(self):
        """The bucket layouts, in forward order."""
        return self._layouts

    @property
    def main_parameters(self) -> list[nn.Parameter]:
        """The registered main parameters, frozen ones too."""
        return [main.parameter for main in self._mains]

    def _make_buckets(self, precision: Precision) -> None:
        by_fqn = {weight.fqn: weight for weight in self._weights}
        for layout in self._layouts:
            first = by_fqn[layout.members[0].weight.fqn]
            bucket = Bucket(
                layout,
                first.mesh.data_parallel,
                precision=precision,
                device=local_tensor(first.parameter).device,
            )
            self._buckets.append(bucket)
            for main_layout in layout.mains:
                self._make_main(bucket, main_layout, by_fqn)

    def _make_main(
        self, bucket: Bucket, layout: MainLayout, by_fqn: dict[str, _Weight]
    ) -> None:
        weights = [by_fqn[member.weight.fqn] for member in layout.members]
        for weight, member in zip(weights, layout.members, strict=True):
            weight.member = member
            _relay(weight, layout, bucket)
        shard = bucket.main[layout.local_start : layout.local_start + layout.units_per_rank]
        parameter = nn.Parameter(
            weights[0].mesh.main_tensor(shard), requires_grad=weights[0].trainable
        )
        main = _Main(layout, bucket, self, weights, parameter, bucket.payload(layout))
        parameter._zero1_main = main
        self._mains.append(main)
        for weight in weights:
            weight.main = main
            weight.parameter = parameter
            for module, name in weight.readers:
                module.register_parameter(name, parameter)

    def _is_trainable(self, bucket: Bucket) -> bool:
        return any(main.bucket is bucket and main.parameter.requires_grad for main in self._mains)

    def _bind_compute_weights(self, precision: Precision) -> None:
        for weight in self._weights:
            weight.compute = _empty_compute_weight(weight, precision)
            for module, name in weight.readers:
                module.__dict__.setdefault("_compute_weights", {})[name] = weight.compute
            if weight.trainable:
                weight.leaf.register_post_accumulate_grad_hook(
                    functools.partial(self._on_gradient, weight)
                )
        for module in {id(m): m for w in self._weights for m, _ in w.readers}.values():
            fp8_names = getattr(module, "fp8_weights", ())
            names = tuple(name for name in module._compute_weights if name not in fp8_names)
            if names:
                module.__class__ = reader_class(type(module), names)

    def _refuse_apply(self, model: nn.Module) -> None:
        def refuse(fn: Callable, recurse: bool = True) -> nn.Module:
            raise RuntimeError(
                "the model is sharded by shard_zero1: .to(), .cuda(), .half() and the like would "
                "cast or move FP8 codes and cut main parameters from their buckets. Convert the "
                "model before shard_zero1."
            )

        readers = [module for weight in self._weights for module, _ in weight.readers]
        for module in [model, *readers]:
            module.__dict__["_apply"] = refuse

    # Backward: fold-accumulate, reduce.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backward passes reduce gradients, as FSDP2's method of this name.

        Switch it off for all micro-batches of a step but the last: gradients then add up locally.
        """
        self._requires_gradient_sync = requires_gradient_sync

    def drop_gradients(self) -> None:
        """Forget gradients that were accumulated but not reduced, after a failed backward, say."""
        for bucket in self._buckets:
            bucket.drop_gradient()
        self._reset_backwards()

    def _reset_backwards(self) -> None:
        self._backwards_seen = 0
        self._unreduced_backwards = 0
        self._graph_task: int | None = None
        self._used_locally: set[_Weight] = set()

    @torch.no_grad()
    def _on_gradient(self, weight: _Weight, leaf: torch.Tensor) -> None:
        self._enter_backward()
        gradient = local_tensor(leaf.grad)
        leaf.grad = None
        weight.main.bucket.accumulate(weight.main.layout, weight.member, weight.to_units(gradient))
        self._used_locally.add(weight)
        if self._reduces_now:
            self._awaited[weight.main.bucket].discard(weight)
            self._start_ready_reductions()

    def _enter_backward(self) -> None:
        graph_task = torch._C._current_graph_task_id()
        if graph_task == self._graph_task:
            return
        if self._graph_task is not None:
            raise RuntimeError(
                "the backward before this one failed and left gradients behind: "
                "call optimizer.zero_grad() before the next backward"
            )
        if not self._optimizers:
            raise RuntimeError(
                "no optimizer is attached, its updates would never be published: "
                "call zero1.attach(optimizer) before training"
            )
        self._graph_task = graph_task
        self._reduces_now = (
            self._requires_gradient_sync and self._backwards_seen == self.backwards_per_step - 1
        )
        self._awaited = {bucket: set() for bucket in self._reduce_order}
        for weight in self._weights:
            if weight.trainable:
                self._awaited[weight.main.bucket].add(weight)
        self._to_reduce = list(reversed(self._reduce_order))
        Variable._execution_engine.queue_callback(self._leave_backward)

    def _start_ready_reductions(self) -> None:
        # One fixed order on all ranks, whatever order buckets complete in: collectives that are
        # started in different orders deadlock.
        while self._to_reduce and not self._awaited[self._to_reduce[-1]]:
            self._to_reduce.pop().start_reduce()

    @torch.no_grad()
    def _leave_backward(self) -> None:
        self._graph_task = None
        if self._requires_gradient_sync:
            self._backwards_seen += 1
        if not self._reduces_now:
            self._unreduced_backwards += 1
            return
        while self._to_reduce:  # buckets with a weight that this rank did not use
            self._to_reduce.pop().start_reduce()
        for bucket in self._reduce_order:
            self._assign_gradients(bucket, bucket.finish_reduce())
        self._reset_backwards()
        self._is_norm_agreed = False

    def _assign_gradients(self, bucket: Bucket, reduced: ReducedGradient) -> None:
        for main in self._mains:
            if main.bucket is not bucket:
                continue
            used = [weight for weight in main.weights if self._is_used(weight, reduced)]
            if not used:
                continue
            self._used_in_step.update(used)
            local = main.local(reduced.units).to(main.parameter.dtype)
            gradient = main.weights[0].mesh.main_tensor(local)
            if main.parameter.grad is None:
                main.parameter.grad = gradient
            else:
                main.parameter.grad += gradient

    def _is_used(self, weight: _Weight, reduced: ReducedGradient) -> bool:
        # What this rank used need not be asked: that spares the wait for the device.
        return weight in self._used_locally or reduced.is_used_by_any_rank(weight.member)

    # The optimizer step: skip or update, then publish.

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Publish after every step of an optimizer of this model's main parameters.

        Its `step` is an error after fewer backward passes than expected, and is skipped on all
        ranks where the gradient norm is not finite. Its `zero_grad` also drops gradients that
        were not reduced. Raises ValueError if it holds a parameter that is no main parameter.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                main = main_of(parameter)
                if main is None or main.owner is not self:
                    raise ValueError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that "
                        "is no main parameter of this model: make the optimizer after shard_zero1"
                    )
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        zero_grad = optimizer.zero_grad

        def drop_and_zero_grad(set_to_none: bool = True) -> None:
            self.drop_gradients()
            zero_grad(set_to_none)

        optimizer.zero_grad = drop_and_zero_grad  # optimizers have no zero_grad hook
        self._optimizers.append(optimizer)

    def clip_grad_norm_(self, max_norm: float, *, foreach: bool | None = None) -> torch.Tensor:
        """Clip all gradients by their total norm, and return it; see `clip_grad_norm_`."""
        return clip_grad_norm_(self.main_parameters, max_norm, foreach=foreach)

    def agree_on_norm(self, norm: torch.Tensor) -> bool:
        """Take the step's total norm; drop all gradients, and count a skip, if it is not finite.

        Returns whether the step goes on. `norm` must be the same on all ranks.
        """
        self._is_norm_agreed = True
        if norm.isfinite():
            return True
        for main in self._mains:
            main.parameter.grad = None
        self._is_skipped = True
        self.skipped_steps += 1
        return False

    def clip(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a 0-dim tensor: in the update where the optimizer can."""
        if all(hasattr(optimizer, "clip_factor") for optimizer in self._optimizers):
            for optimizer in self._optimizers:
                optimizer.clip_factor = factor
            return
        gradients = [
            local_tensor(main.parameter.grad)
            for main in self._mains
            if main.parameter.grad is not None
        ]
        torch._foreach_mul_(gradients, factor)

    def _reset_step(self) -> None:
        self._is_norm_agreed = False
        self._is_skipped = False
        self._used_in_step: set[_Weight] = set()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._unreduced_backwards:
            raise RuntimeError(self._describe_unreduced())
        if not self._is_norm_agreed:
            self.agree_on_norm(total_norm(self._gradients()))
        if not self._is_skipped:
            self._keep_unused_members(optimizer)

    def _describe_unreduced(self) -> str:
        if not self._requires_gradient_sync:
            return (
                "optimizer.step() while set_requires_gradient_sync(False) is in force: "
                f"{self._unreduced_backwards} backward passes were accumulated but not reduced. "
                "Switch it on before the last backward of a step."
            )
        return (
            f"optimizer.step() after {self._backwards_seen} of {self.backwards_per_step} "
            "backward passes: finish the step's micro-batches, or call optimizer.zero_grad() to "
            "drop them"
        )

    def _gradients(self) -> Iterable[torch.Tensor]:
        return [main.parameter.grad for main in self._mains if main.parameter.grad is not None]

    def _keep_unused_members(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what the step must not change: pooled weights that no rank used.

        A weight alone in its main parameter simply has no gradient then.
        """
        for main in self._mains:
            if main.parameter.grad is None or not self._used_in_step:
                continue
            main.updates += 1
            for weight in main.weights:
                if weight in self._used_in_step:
                    self._check_updates(weight)
                    continue
                states = optimizer.state.get(main.parameter, {}).values()
                for tensor in [main.parameter, *states]:
                    if tensor.shape == main.parameter.shape:
                        self._keep_runs(main, weight, local_tensor(tensor.detach()))

    def _check_updates(self, weight: _Weight) -> None:
        weight.updates += 1
        if weight.updates != weight.main.updates:
            others = [other.fqn for other in weight.main.weights if other is not weight]
            raise RuntimeError(
                f"{weight.fqn} had a gradient in this step but not in every step before, and it "
                f"shares a main parameter, and its step count, with {', '.join(others)}: use the "
                'strategy "block" with padding_limit=1.0, which pools nothing'
            )

    def _keep_runs(self, main: _Main, weight: _Weight, local: torch.Tensor) -> None:
        rank = main.bucket.mesh.rank
        for run in main.layout.runs(weight.member):
            if run.rank == rank:
                start = run.local_start - main.layout.local_start
                units = local[start : start + run.units]
                self._kept.append((units, units.clone()))

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for units, kept in self._kept:
            units.copy_(kept)
        was_skipped, has_restored = self._is_skipped, bool(self._kept)
        self._reset_step()
        if was_skipped:
            return
        if has_restored:
            self._mark_payloads_stale()
        self._publish(self._reduce_order)

    # Publish.

    def publish_all(self) -> None:
        """Quantize and publish every main parameter, after a change from outside (a load, say)."""
        self._mark_payloads_stale()
        self._publish(self._buckets)

    def _mark_payloads_stale(self) -> None:
        for main in self._mains:
            main.payload.is_fresh = False

    @torch.no_grad()
    def _publish(self, buckets: list[Bucket]) -> None:
        for main in self._mains:
            if main.bucket in buckets and not main.payload.is_fresh:
                main.payload.write(local_tensor(main.parameter.detach()))
        for bucket in buckets:
            bucket.start_publish()
        for bucket in buckets:
            gathered = bucket.finish_publish()
            for main in self._mains:
                if main.bucket is bucket:
                    main.payload.is_fresh = False
                    for weight in main.weights:
                        _unfold_into(weight, *gathered.member(main.layout, weight.member))


def shard_zero1(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    expert_mesh: DeviceMesh | None = None,
    strategy: Strategy = "block",
    compute_dtype: torch.dtype = torch.bfloat16,
    gradient_dtype: torch.dtype = torch.float32,
    scale_format: ScaleFormat = "fp32",
    round_main_to_bf16: bool = False,
    bucket_bytes: int = 512 << 20,
    padding_limit: float = 0.02,
    backwards_per_step: int = 1,
) -> Zero1:
    """Shard a model's parameters over a data-parallel mesh, ZeRO-1 at tile granularity.

    Every parameter becomes an fp32 main parameter, sharded by `BlockShard`: tiles
    `[T_padded, 128, 128]` where a module computes in FP8, 1-D otherwise. Modules read compute
    weights instead, which every data-parallel rank holds whole. Make optimizers of
    `model.parameters()` afterwards, and attach them.

    Args:
        model: materialized, the same weights on every rank. Parameters are plain tensors, or
            DTensors over the data-parallel mesh with, for expert parallelism, more dims behind.
        mesh: 1-D, or 2-D (replicate, shard) for HSDP; None for a single process.
        expert_mesh: the data-parallel mesh of expert weights under expert parallelism; its dims
            are dims of the expert weights' own mesh.
        strategy: "block" shares out tiles, "param" whole weights; the results are the same bits.
        compute_dtype: bf16 or fp32, of high-precision compute weights and of FP8 weights' gradients.
        gradient_dtype: of gradient accumulation and reduction.
        scale_format: "fp32", or "ue8m0": powers of two.
        round_main_to_bf16: round main parameters to bf16 before quantizing.
        bucket_bytes: largest gradient payload of one reduce-scatter.
        padding_limit: share of a bucket above which small parameters are pooled.
        backwards_per_step: backward passes that make up an optimizer step; the last one reduces.

    Raises ValueError or TypeError that names the parameter or argument, and what was expected.
    """
    for name, dtype in (("compute_dtype", compute_dtype), ("gradient_dtype", gradient_dtype)):
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"{name} must be torch.bfloat16 or torch.float32, got {dtype}")
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {SCALE_FORMATS}, got {scale_format!r}")
    if backwards_per_step < 1:
        raise ValueError(f"backwards_per_step must be at least 1, got {backwards_per_step}")
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(
            f"mesh must be 1-D (shard) or 2-D (replicate, shard), got {mesh.ndim} dims"
        )
    weights = _collect_weights(model, mesh, expert_mesh)
    if not weights:
        raise ValueError("the model has no parameters")
    return Zero1(
        model,
        weights,
        Precision(compute_dtype, gradient_dtype, scale_format, round_main_to_bf16),
        strategy=strategy,
        bucket_bytes=bucket_bytes,
        padding_limit=padding_limit,
        backwards_per_step=backwards_per_step,
    )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip the gradients of main parameters by their total norm, and return it (0-dim tensor).

    `parameters` are all main parameters of one or several models (pipeline stages). The norm is
    the one number on which all ranks agree, so it also decides the skip: where it is not finite
    no gradient is left, and the next step changes nothing on any rank.
    """
    mains = [main for main in map(main_of, parameters) if main is not None]
    gradients = [main.parameter.grad for main in mains if main.parameter.grad is not None]
    norm = total_norm(gradients, foreach=foreach, pp_mesh=pp_mesh)
    for zero1 in dict.fromkeys(main.owner for main in mains):
        if zero1.agree_on_norm(norm):
            zero1.clip(clip_factor(norm, max_norm))
    return norm


def _collect_weights(
    model: nn.Module, mesh: DeviceMesh | None, expert_mesh: DeviceMesh | None
) -> list[_Weight]:
    weights: dict[int, _Weight] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fqn = _clean_fqn(f"{module_name}.{name}" if module_name else name)
            is_fp8 = name in getattr(module, "fp8_weights", ())
            if id(parameter) in weights:
                _add_reader(weights[id(parameter)], fqn, is_fp8, module, name)
                continue
            _check_parameter(fqn, parameter)
            weight_mesh = _weight_mesh(fqn, parameter, mesh, expert_mesh)
            weights[id(parameter)] = _Weight(
                fqn,
                [(module, name)],
                parameter,
                is_fp8,
                weight_mesh,
                _local_shape(parameter, weight_mesh),
            )
    return list(weights.values())


def _clean_fqn(fqn: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        fqn = fqn.replace(prefix, "")
    return fqn


def _add_reader(weight: _Weight, fqn: str, is_fp8: bool, module: nn.Module, name: str) -> None:
    if weight.is_fp8 != is_fp8:
        raise ValueError(
            f"{weight.fqn} and {fqn} are one tied parameter, but only one of them computes in FP8: "
            "convert both modules, or none"
        )
    weight.readers.append((module, name))


def _check_parameter(fqn: str, parameter: nn.Parameter) -> None:
    if main_of(parameter) is not None:
        raise ValueError(f"{fqn} is a main parameter already: shard_zero1 was called twice")
    if parameter.is_meta:
        raise ValueError(f"{fqn} is on the meta device: materialize it before shard_zero1")
    if not parameter.is_floating_point() or parameter.element_size() == 1:
        raise TypeError(f"{fqn} must be fp32, bf16 or fp16, got {parameter.dtype}")
    if parameter.numel() == 0:
        raise ValueError(f"{fqn} has no elements: shape {tuple(parameter.shape)}")


def _weight_mesh(
    fqn: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh | None,
    expert_mesh: DeviceMesh | None,
) -> _WeightMesh:
    if not isinstance(parameter, DTensor):
        if mesh is None:
            return _WeightMesh(None, (), DataParallelMesh(None, None), ())
        names = tuple(range(mesh.ndim))
        return _place(mesh, names, names, ())
    names = parameter.device_mesh.mesh_dim_names or ()
    known = {name for m in (mesh, expert_mesh) if m is not None for name in m.mesh_dim_names or ()}
    data_parallel = tuple(index for index, name in enumerate(names) if name in known)
    if not data_parallel:
        raise ValueError(
            f"{fqn} is a DTensor over mesh dims {names}, none of which is a data-parallel dim "
            f"({sorted(known)}): name them in mesh or expert_mesh"
        )
    model_parallel = tuple(
        (name, parameter.placements[index])
        for index, name in enumerate(names)
        if index not in data_parallel
    )
    return _place(
        parameter.device_mesh, tuple(range(len(names))), data_parallel, model_parallel
    )


def _place(
    mesh: DeviceMesh,
    dims: tuple[int, ...],
    data_parallel: tuple[int, ...],
    model_parallel: tuple[tuple[str, Placement], ...],
) -> _WeightMesh:
    """The last data-parallel dim shards, one in front of it replicates (HSDP)."""
    *replicate_dims, shard_dim = data_parallel
    sharded_elsewhere = dict(model_parallel)
    placements: list[Placement] = []
    for dim in dims:
        if dim == shard_dim:
            placements.append(BlockShard())
        elif dim in replicate_dims:
            placements.append(Replicate())
        else:
            # Expert shards lie end to end in dim 0, so that a norm over the mesh counts each once.
            assert mesh.mesh_dim_names is not None
            is_shard = sharded_elsewhere[mesh.mesh_dim_names[dim]].is_shard()
            placements.append(Shard(0) if is_shard else Replicate())
    return _WeightMesh(
        mesh,
        tuple(placements),
        DataParallelMesh(
            _submesh(mesh, shard_dim), _submesh(mesh, replicate_dims[0]) if replicate_dims else None
        ),
        model_parallel,
    )


def _submesh(mesh: DeviceMesh, dim: int) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dim]]


def _local_shape(parameter: nn.Parameter, mesh: _WeightMesh) -> tuple[int, ...]:
    """Shape of what one model-parallel rank holds whole."""
    shape = list(parameter.shape)
    for name, placement in mesh.model_parallel:
        if isinstance(placement, Shard):
            size = mesh.mesh[name].size()
            if shape[placement.dim] % size:
                raise ValueError(
                    f"dim {placement.dim} of shape {tuple(parameter.shape)} is not divisible by "
                    f"mesh dim {name!r} of size {size}"
                )
            shape[placement.dim] //= size
    return tuple(shape)


def _weight_spec(weight: _Weight, precision: Precision) -> WeightSpec:
    numel = torch.Size(weight.shape).numel()
    return WeightSpec(
        fqn=weight.fqn,
        units=num_tiles(weight.shape) if weight.is_fp8 else numel,
        numel=numel,
        unit_bytes=precision.gradient.itemsize * (TILE_NUMEL if weight.is_fp8 else 1),
        num_ranks=weight.mesh.data_parallel.num_ranks,
        is_fp8=weight.is_fp8,
        group=(weight.mesh, weight.is_fp8, weight.trainable),
    )


@torch.no_grad()
def _relay(weight: _Weight, layout: MainLayout, bucket: Bucket) -> None:
    """Gather one parameter over the data-parallel ranks, and keep this rank's units of it."""
    full = weight.parameter
    if isinstance(full, DTensor):
        names = full.device_mesh.mesh_dim_names
        kept = dict(weight.mesh.model_parallel)
        full = full.redistribute(
            placements=[kept.get(name, Replicate()) for name in names]
        ).to_local()
    units = weight.to_units(full.detach())
    for run in layout.runs(weight.member):
        if run.rank == bucket.mesh.rank:
            bucket.main[run.local_start : run.local_start + run.units].copy_(
                units[run.start : run.start + run.units]
            )


def _empty_compute_weight(weight: _Weight, precision: Precision) -> FP8Weight | torch.Tensor:
    device = weight.main.bucket.main.device
    if weight.is_fp8:
        return FP8Weight(
            codes=torch.zeros(weight.shape, dtype=torch.float8_e4m3fn, device=device),
            scale_inv=torch.ones(scale_shape_of(weight.shape), device=device),
            carrier=gradient_carrier(weight.shape, precision.compute, device).requires_grad_(
                weight.trainable
            ),
        )
    leaf = torch.zeros(weight.shape, dtype=precision.compute, device=device)
    if weight.mesh.model_parallel:
        names = tuple(name for name, _ in weight.mesh.model_parallel)
        placements = [placement for _, placement in weight.mesh.model_parallel]
        leaf = DTensor.from_local(leaf, weight.mesh.mesh[names], placements, run_check=False)
    return leaf.requires_grad_(weight.trainable)


def _unfold_into(
    weight: _Weight, units: torch.Tensor, scale_inv: torch.Tensor | None
) -> None:
    """Write published units into a compute weight, in place: compiled graphs keep its address."""
    if isinstance(weight.compute, FP8Weight):
        assert scale_inv is not None
        weight.compute.codes.copy_(unfold(units, weight.shape))
        weight.compute.scale_inv.copy_(scale_inv.view(weight.compute.scale_inv.shape))
    else:
        local_tensor(weight.compute.detach()).copy_(units.view(weight.shape))
