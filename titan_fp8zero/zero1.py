"""`shard_zero1`: registers main parameters, says when to reduce gradients and publish weights."""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from titan_fp8zero.blocks import SCALE_FORMATS, ScaleFormat
from titan_fp8zero.bucket import Bucket, Precision, ReducedGradient
from titan_fp8zero.checkpoint import use_weight_views
from titan_fp8zero.clip import clip_grad_norm_, total_norm
from titan_fp8zero.compute_weight import reader_class
from titan_fp8zero.layout import BucketLayout, Strategy, plan_buckets
from titan_fp8zero.main_parameter import (
    MainParameter,
    Weight,
    collect_weights,
    empty_compute_weight,
    local_tensor,
    main_of,
    make_main_parameter,
    weight_spec,
)
from titan_fp8zero.step import StepState

logger = logging.getLogger("titan_fp8zero")


class Zero1:
    """What `shard_zero1` returns: attach optimizers to it, clip with it, publish through it."""

    def __init__(
        self,
        model: nn.Module,
        weights: list[Weight],
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
        layouts = plan_buckets(
            [weight_spec(weight, precision) for weight in weights],
            strategy=strategy,
            bucket_bytes=bucket_bytes,
            padding_limit=padding_limit,
        )
        self._mains_of = dict(self._make_bucket(layout, precision) for layout in layouts)
        # Backward meets the last modules first: their buckets are complete, and reduced, first.
        self._reduce_order = [
            bucket
            for bucket, mains in reversed(self._mains_of.items())
            if mains[0].parameter.requires_grad
        ]
        self._reset_backwards()
        self._step = StepState()
        self._bind_compute_weights(precision)
        self._refuse_copies(model)
        use_weight_views(weights)
        self.publish_all()
        model.register_load_state_dict_post_hook(lambda module, keys: self.publish_all())

    # Making main parameters and compute weights.

    @property
    def layouts(self) -> list[BucketLayout]:
        """The bucket layouts, in forward order."""
        return [bucket.layout for bucket in self._mains_of]

    @property
    def main_parameters(self) -> list[nn.Parameter]:
        """The registered main parameters, frozen ones too."""
        return [main.parameter for main in self._mains()]

    def _mains(self) -> Iterable[MainParameter]:
        return (main for mains in self._mains_of.values() for main in mains)

    def _make_bucket(
        self, layout: BucketLayout, precision: Precision
    ) -> tuple[Bucket, list[MainParameter]]:
        by_fqn = {weight.fqn: weight for weight in self._weights}
        first = by_fqn[layout.members[0].weight.fqn]
        device = local_tensor(first.parameter).device
        bucket = Bucket(layout, first.mesh.data_parallel, precision=precision, device=device)
        mains = []
        for main_layout in layout.mains:
            weights = [by_fqn[member.weight.fqn] for member in main_layout.members]
            mains.append(make_main_parameter(main_layout, bucket, weights, self))
        return bucket, mains

    def _bind_compute_weights(self, precision: Precision) -> None:
        for weight in self._weights:
            weight.compute = empty_compute_weight(weight, precision)
            for module, name in weight.readers:
                module.__dict__.setdefault("_compute_weights", {})[name] = weight.compute
            if weight.trainable:
                on_gradient = functools.partial(self._on_gradient, weight)
                weight.leaf.register_post_accumulate_grad_hook(on_gradient)
        for module in self._reader_modules():
            fp8_names = getattr(module, "fp8_weights", ())
            compute_weights = module.__dict__["_compute_weights"]
            names = tuple(name for name in compute_weights if name not in fp8_names)
            if names:
                base: Any = type(module)
                module.__class__ = reader_class(base, names)

    def _reader_modules(self) -> Iterable[nn.Module]:
        return dict.fromkeys(module for weight in self._weights for module, _ in weight.readers)

    def _refuse_copies(self, model: nn.Module) -> None:
        def refuse_copy(*args: Any) -> Any:
            raise RuntimeError(
                "the model is sharded by shard_zero1 and cannot be copied or pickled: its main "
                "parameters are views of buckets. Save model.state_dict() through "
                "torch.distributed.checkpoint, or copy the model before shard_zero1."
            )

        def refuse(fn: Callable, recurse: bool = True) -> nn.Module:
            raise RuntimeError(
                "the model is sharded by shard_zero1: .to(), .cuda(), .half() and the like would "
                "cast or move FP8 codes and cut main parameters from their buckets. Convert the "
                "model before shard_zero1."
            )

        for module in [model, *self._reader_modules()]:
            module.__dict__["_apply"] = refuse
            module.__dict__["__deepcopy__"] = refuse_copy
            module.__dict__["__reduce_ex__"] = refuse_copy

    # Backward: fold-accumulate, reduce.

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backward passes reduce gradients, as FSDP2's method of this name.

        Switch it off for all micro-batches of a step but the last: gradients then add up locally.
        """
        self._requires_gradient_sync = requires_gradient_sync

    def drop_gradients(self) -> None:
        """Forget gradients that were accumulated but not reduced, after a failed backward, say."""
        for weight in self._weights:
            weight.leaf.grad = None
        for bucket in self._mains_of:
            bucket.drop_gradient()
        self._reset_backwards()

    def _reset_backwards(self) -> None:
        self._backwards_seen = 0
        self._unreduced_backwards = 0
        self._graph_task: int | None = None
        self._used_locally: set[Weight] = set()

    @torch.no_grad()
    def _on_gradient(self, weight: Weight, leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        gradient = weight.mesh.local_gradient(leaf.grad)
        leaf.grad = None
        if gradient.layout != torch.strided:
            raise RuntimeError(f"{weight.fqn} has a sparse gradient: only dense ones are reduced")
        self._enter_backward()
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
                "the backward before this one failed and left gradients behind: call "
                "optimizer.zero_grad() before the next backward. (If none failed: reentrant "
                "activation checkpointing does not work, use use_reentrant=False.)"
            )
        if not self._optimizers:
            raise RuntimeError(
                "no optimizer is attached, its updates would never be published: "
                "call zero1.attach(optimizer) before training"
            )
        self._check_requires_grad()
        self._graph_task = graph_task
        self._reduces_now = (
            self._requires_gradient_sync and self._backwards_seen == self.backwards_per_step - 1
        )
        self._awaited = {
            bucket: {weight for main in self._mains_of[bucket] for weight in main.weights}
            for bucket in self._reduce_order
        }
        self._to_reduce = list(reversed(self._reduce_order))
        Variable._execution_engine.queue_callback(self._leave_backward)

    def _check_requires_grad(self) -> None:
        changed = [
            weight.fqn
            for weight in self._weights
            if weight.parameter.requires_grad != weight.leaf.requires_grad
        ]
        if changed:
            raise RuntimeError(
                f"requires_grad of {', '.join(changed)} was changed after shard_zero1: freeze or "
                "unfreeze parameters before"
            )

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
        if self._step.stepped:
            self._step = StepState()
        self._step.is_norm_agreed = False
        for bucket in self._reduce_order:
            self._assign_gradients(bucket, bucket.finish_reduce())
        self._reset_backwards()

    def _assign_gradients(self, bucket: Bucket, reduced: ReducedGradient) -> None:
        for main in self._mains_of[bucket]:
            used = [weight for weight in main.weights if self._is_used(weight, reduced)]
            if not used:
                continue
            self._step.used.update(used)
            local = main.local(reduced.units).to(main.parameter.dtype)
            gradient = main.weights[0].mesh.main_tensor(local)
            if main.parameter.grad is None:
                main.parameter.grad = gradient
            else:
                main.parameter.grad += gradient

    def _is_used(self, weight: Weight, reduced: ReducedGradient) -> bool:
        # What this rank used need not be asked: that spares the wait for the device.
        return weight in self._used_locally or reduced.is_used_by_any_rank(weight.member)

    # The optimizer step: skip or update, then publish.

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Publish after every step of an optimizer of this model's main parameters.

        Its `step` is an error after fewer backward passes than expected, and is skipped on all
        ranks where the gradient norm is not finite. Its `zero_grad` also drops gradients that
        were not reduced. Raises ValueError if it holds a parameter that is no main parameter.
        """
        if optimizer in self._optimizers:
            raise ValueError("this optimizer is attached already")
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
            if hasattr(optimizer, "clip_factor"):
                optimizer.clip_factor = None
            zero_grad(set_to_none)
            if not self.gradients:  # else another optimizer's turn in this step is to come
                self._step = StepState()

        # Optimizers have no zero_grad hook.
        optimizer.zero_grad = drop_and_zero_grad  # type: ignore[method-assign]
        self._optimizers.append(optimizer)

    def clip_grad_norm_(self, max_norm: float, *, foreach: bool | None = None) -> torch.Tensor:
        """Clip all gradients by their total norm, and return it; see `clip_grad_norm_`."""
        return clip_grad_norm_(self.main_parameters, max_norm, foreach=foreach)

    def agree_on_norm(self, norm: torch.Tensor) -> bool:
        """Take the step's total norm; drop all gradients, and count a skip, if it is not finite.

        Returns whether the step goes on. `norm` must be the same on all ranks.
        """
        self._step.is_norm_agreed = True
        self._step.is_skipped = not bool(norm.isfinite())
        if self._step.is_skipped:
            self.skipped_steps += 1
            logger.warning(
                "step skipped on all ranks, the gradient norm is %s; skipped so far: %d",
                norm.item(),
                self.skipped_steps,
            )
            for main in self._mains():
                main.parameter.grad = None
        return not self._step.is_skipped

    @property
    def pending_clip_factor(self) -> torch.Tensor | None:
        """What the next update multiplies gradients by, if clipping was left to it."""
        factors = [getattr(optimizer, "clip_factor", None) for optimizer in self._optimizers]
        return next((factor for factor in factors if factor is not None), None)

    def clip(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a 0-dim tensor: in the update where the optimizer can."""
        if all(hasattr(optimizer, "clip_factor") for optimizer in self._optimizers):
            pending = self.pending_clip_factor
            for optimizer in self._optimizers:
                optimizer.clip_factor = (  # type: ignore[attr-defined]
                    factor if pending is None else pending * factor
                )
            return
        torch._foreach_mul_([local_tensor(gradient) for gradient in self.gradients], factor)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._decide_step(optimizer)
            return None

        def closure_then_decide() -> Any:
            loss = closure()
            self._decide_step(optimizer)
            return loss

        return (args[0], closure_then_decide), {}

    @torch.no_grad()
    def _decide_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip the step or let it go on; raises if gradients are not complete."""
        if self._graph_task is not None or self._unreduced_backwards:
            raise RuntimeError(self._describe_incomplete())
        if optimizer in self._step.stepped:
            self._step = StepState()
        if not self._step.is_norm_agreed:
            self.agree_on_norm(total_norm(self.gradients))
        if not self._step.is_skipped:
            self._step.keep_unused_weights(optimizer)

    def _describe_incomplete(self) -> str:
        if self._graph_task is not None:
            return "optimizer.step() after a backward that failed: call optimizer.zero_grad() first"
        if not self._backwards_seen:
            return (
                f"optimizer.step() after {self._unreduced_backwards} backward passes under "
                "set_requires_gradient_sync(False), which were accumulated but not reduced. "
                "Switch it on before the last backward of a step."
            )
        return (
            f"optimizer.step() after {self._backwards_seen} of {self.backwards_per_step} "
            "backward passes: finish the step's micro-batches, or call optimizer.zero_grad() to "
            "drop them"
        )

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Of the main parameters that have one."""
        return [main.parameter.grad for main in self._mains() if main.parameter.grad is not None]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step.stepped.add(optimizer)
        if self._step.is_skipped:
            return
        if self._step.restore_unused_weights():
            self._mark_payloads_stale()
        self._publish(self._reduce_order)

    # Publish.

    def publish_all(self) -> None:
        """Quantize and publish every main parameter, after a change from outside (a load, say)."""
        self._mark_payloads_stale()
        self._publish(list(self._mains_of))

    def _mark_payloads_stale(self) -> None:
        for main in self._mains():
            main.payload.is_fresh = False

    @torch.no_grad()
    def _publish(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            for main in self._mains_of[bucket]:
                if not main.payload.is_fresh:
                    main.payload.write(local_tensor(main.parameter.detach()))
                main.payload.is_fresh = False
            bucket.start_publish()
        for bucket in buckets:
            gathered = bucket.finish_publish()
            for main in self._mains_of[bucket]:
                for weight in main.weights:
                    weight.write_compute(*gathered.member(main.layout, weight.member))


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
    padding_limit: float = float("inf"),
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
        compute_dtype: bf16 or fp32, of high-precision compute weights and FP8 weights' gradients;
            the caller gives inputs in it.
        gradient_dtype: of gradient accumulation and reduction.
        scale_format: "fp32", or "ue8m0": powers of two.
        round_main_to_bf16: round main parameters to bf16 before quantizing.
        bucket_bytes: largest gradient payload of one reduce-scatter.
        padding_limit: share of a bucket above which small parameters are pooled; inf pools nothing.
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
    weights = collect_weights(model, mesh, expert_mesh)
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
