"""`shard_zero1`: registers main parameters, says when to reduce gradients and publish weights."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from titan_fp8zero.agreement import check_agreement, describe_layouts
from titan_fp8zero.blocks import SCALE_FORMATS, ScaleFormat
from titan_fp8zero.bucket import Bucket, Precision
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
from titan_fp8zero.publish import Publisher
from titan_fp8zero.reduce import GradientReducer
from titan_fp8zero.ring import GradientRing
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
        overlap: bool,
        keep_transposed: bool,
    ) -> None:
        self.backwards_per_step = backwards_per_step
        self.skipped_steps = 0
        """Steps that all ranks skipped because the gradient norm was not finite."""
        self._weights = weights
        self._optimizers: list[torch.optim.Optimizer] = []
        layouts = plan_buckets(
            [weight_spec(weight, precision) for weight in weights],
            strategy=strategy,
            bucket_bytes=bucket_bytes,
            padding_limit=padding_limit,
        )
        options = {
            **precision._asdict(),
            "strategy": strategy,
            "bucket_bytes": bucket_bytes,
            "padding_limit": padding_limit,
            "backwards_per_step": backwards_per_step,
            "overlap": overlap,
            "keep_transposed": keep_transposed,
        }
        described = [f"{name} = {value}" for name, value in options.items()]
        self._check_agreement([*described, *describe_layouts(layouts)])
        ring = GradientRing()
        self._mains_of = dict(self._make_bucket(layout, precision, ring) for layout in layouts)
        self._step = StepState()
        self._bind_compute_weights(precision, keep_transposed)
        self._refuse_copies(model)
        self._reducer = GradientReducer(
            self._mains_of,
            backwards_per_step=backwards_per_step,
            on_backward=self._before_backward,
            on_reduced=self._take_gradients,
        )
        self._publisher = Publisher(model, self._mains_of, overlap=overlap)
        self._trainable_buckets = [
            bucket for bucket, mains in self._mains_of.items() if mains[0].parameter.requires_grad
        ]
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

    def leaves(self) -> list[torch.Tensor]:
        """Where autograd delivers the gradients of trainable weights: gradient carriers, and
        high-precision compute weights."""
        return [weight.leaf for weight in self._weights if weight.trainable]

    def weights_with_local_blocks(self) -> list[str]:
        """FQNs of FP8 weights whose blocks depend on the tensor-parallel mesh: their shards are no
        whole number of blocks."""
        return [
            weight.fqn
            for weight in self._weights
            if weight.is_fp8 and weight.mesh.cuts_blocks(weight.shape)
        ]

    def _mains(self) -> Iterable[MainParameter]:
        return (main for mains in self._mains_of.values() for main in mains)

    def _check_agreement(self, lines: list[str]) -> None:
        meshes = dict.fromkeys(
            mesh
            for weight in self._weights
            for mesh in weight.mesh.data_parallel
            if mesh is not None
        )
        for mesh in meshes:
            check_agreement(mesh, lines)

    def _make_bucket(
        self, layout: BucketLayout, precision: Precision, ring: GradientRing
    ) -> tuple[Bucket, list[MainParameter]]:
        by_fqn = {weight.fqn: weight for weight in self._weights}
        first = by_fqn[layout.members[0].weight.fqn]
        device = local_tensor(first.parameter).device
        bucket = Bucket(
            layout, first.mesh.data_parallel, precision=precision, ring=ring, device=device
        )
        mains = []
        for main_layout in layout.mains:
            weights = [by_fqn[member.weight.fqn] for member in main_layout.members]
            mains.append(make_main_parameter(main_layout, bucket, weights, self))
        return bucket, mains

    def _bind_compute_weights(self, precision: Precision, keep_transposed: bool) -> None:
        for weight in self._weights:
            weight.compute = empty_compute_weight(weight, precision, keep_transposed)
            for module, name in weight.readers:
                module.__dict__.setdefault("_compute_weights", {})[name] = weight.compute
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
        self._reducer.requires_gradient_sync = requires_gradient_sync

    def _before_backward(self) -> None:
        if not self._optimizers:
            raise RuntimeError(
                "no optimizer is attached, its updates would never be published: "
                "call zero1.attach(optimizer) before training"
            )
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
        # All-gathers before reduce-scatters, also on a rank whose forward skipped the last blocks.
        self._publisher.wait()

    def _take_gradients(self, used: set[Weight]) -> None:
        if self._step.stepped:
            self._step = StepState()
        self._step.is_norm_agreed = False
        self._step.used |= used

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
            self._reducer.drop_gradients()
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
        gradients = [local_tensor(gradient) for gradient in self.gradients]
        if gradients:  # of an empty list, torch makes an error
            torch._foreach_mul_(gradients, factor)

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
        self._reducer.check_complete()
        self._publisher.wait()  # updates write the payloads
        self._mark_payloads_stale()
        if optimizer in self._step.stepped:  # again, on the same gradients
            self._step = StepState(self._step.used)
        if not self._step.is_norm_agreed:
            self.agree_on_norm(total_norm(self.gradients))
        if not self._step.is_skipped:
            self._step.keep_unused_weights(optimizer)

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
        self._publisher.publish(self._trainable_buckets)

    # Publish.

    def publish_written(self) -> None:
        """Start publishing what an optimizer has written within its step, in forward order."""
        if not self._step.keeps_weights:
            self._publisher.publish_written(self._trainable_buckets)

    def publish_all(self) -> None:
        """Quantize and publish every main parameter, after a change from outside (a load, say)."""
        self._publisher.wait()
        self._mark_payloads_stale()
        self._publisher.publish(list(self._mains_of))

    def wait_for_publish(self) -> None:
        """Wait until every compute weight is fresh, before they are read outside of a forward."""
        self._publisher.wait()

    def _mark_payloads_stale(self) -> None:
        for main in self._mains():
            main.payload.is_fresh = False


def shard_zero1(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    expert_mesh: DeviceMesh | None = None,
    strategy: Strategy = "block",
    compute_dtype: torch.dtype = torch.bfloat16,
    accumulate_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    scale_format: ScaleFormat = "fp32",
    round_main_to_bf16: bool = False,
    bucket_bytes: int = 512 << 20,
    padding_limit: float = float("inf"),
    backwards_per_step: int = 1,
    overlap: bool = False,
    keep_transposed: bool = False,
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
        accumulate_dtype: bf16 or fp32, of gradient buffers, into which micro-batches add up.
        reduce_dtype: bf16 or fp32, of gradients on the wire, in which ranks add up.
        scale_format: "fp32", or "ue8m0": powers of two.
        round_main_to_bf16: round main parameters to bf16 before quantizing.
        bucket_bytes: largest gradient payload of one reduce-scatter.
        padding_limit: share of a bucket above which small parameters are pooled; inf pools nothing.
        backwards_per_step: backward passes that make up an optimizer step; the last one reduces.
        overlap: let the next forward wait for what a step publishes, block by block; else the step
            waits. The results are the same bits. What is compiled must be compiled before
            `shard_zero1`, and be the model itself or modules inside of it: else graphs break.
        keep_transposed: keep a transposed copy of every FP8 weight, a byte a parameter, written
            when the weight is published, for GEMM backends that need one in backward; else they
            transpose it there each time.

    Raises ValueError or TypeError that names the parameter or argument, and what was expected.
    """
    for name, dtype in (
        ("compute_dtype", compute_dtype),
        ("accumulate_dtype", accumulate_dtype),
        ("reduce_dtype", reduce_dtype),
    ):
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
    for weight in weights:
        if weight.parameter.is_meta:
            raise ValueError(
                f"{weight.fqn} is on the meta device: materialize it before shard_zero1"
            )
    return Zero1(
        model,
        weights,
        Precision(compute_dtype, accumulate_dtype, reduce_dtype, scale_format, round_main_to_bf16),
        strategy=strategy,
        bucket_bytes=bucket_bytes,
        padding_limit=padding_limit,
        backwards_per_step=backwards_per_step,
        overlap=overlap,
        keep_transposed=keep_transposed,
    )
