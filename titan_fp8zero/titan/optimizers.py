"""Builds TorchTitan's own optimizers container on main parameters."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torchtitan.components.optimizer as stock_optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_fp8zero.optimizer import BlockwiseAdamW
from titan_fp8zero.titan.checkpoint import MainParameterOptimizers
from titan_fp8zero.titan.parallelize import Sharding, sharding_of
from titan_fp8zero.titan.swap import swapped
from titan_fp8zero.zero1 import Zero1, shard_zero1


def build_optimizers_with(stock: Callable[..., OptimizersContainer]) -> Callable:
    """A stock `build_optimizers_fn` that first re-lays parameters as main parameters.

    This is the one place after `init_weights` and before the optimizer, the LR scheduler, the
    checkpoint manager and the first trace see a parameter.
    """

    @functools.wraps(stock)
    def build_optimizers(
        model_parts: list[nn.Module],
        optimizer_config: OptimizerConfig,
        parallel_dims: ParallelDims,
        ft_manager: Any = None,
    ) -> OptimizersContainer:
        shardings = [sharding_of(part) for part in model_parts]
        zero1s = [
            _shard(part, sharding)
            for part, sharding in zip(model_parts, shardings, strict=True)
            if sharding is not None
        ]
        container = MainParameterOptimizers if zero1s else OptimizersContainer
        with (
            swapped((stock_optimizer,), "build_optimizers", _build_container),
            swapped((stock_optimizer,), "OptimizersContainer", container),
        ):
            build = _build_container if stock is _stock_build_optimizers else stock
            optimizers = build(model_parts, optimizer_config, parallel_dims, ft_manager)
        optimizers.zero1s = zero1s
        if zero1s:
            for zero1, optimizer in zip(zero1s, optimizers, strict=True):
                zero1.attach(optimizer)
            _keep_expert_bias_of_skipped_steps(optimizers, model_parts, zero1s)
        return optimizers

    return build_optimizers


_stock_build_optimizers = stock_optimizer.build_optimizers


def _build_container(
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: Any = None,
) -> OptimizersContainer:
    """TorchTitan's `build_optimizers`, which knows BlockwiseAdamW besides its own."""
    if optimizer_config.name != "BlockwiseAdamW":
        return _stock_build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    return stock_optimizer.OptimizersContainer(
        model_parts,
        BlockwiseAdamW,
        {
            "lr": optimizer_config.lr,
            "betas": (optimizer_config.beta1, optimizer_config.beta2),
            "eps": optimizer_config.eps,
            "weight_decay": optimizer_config.weight_decay,
            "fused": optimizer_config.implementation == "fused",
            "foreach": optimizer_config.implementation == "foreach",
        },
    )


def _shard(model_part: nn.Module, sharding: Sharding) -> Zero1:
    options = sharding.options
    zero1 = shard_zero1(
        model_part,
        sharding.mesh,
        expert_mesh=sharding.expert_mesh,
        strategy=options.strategy,
        compute_dtype=sharding.compute_dtype,
        gradient_dtype=sharding.gradient_dtype,
        scale_format=options.scale_format,
        round_main_to_bf16=options.main_round == "bf16",
        bucket_bytes=options.bucket_mib << 20,
        padding_limit=options.padding_limit,
        backwards_per_step=sharding.backwards_per_step,
    )
    for layout in zero1.layouts:
        kind = "tiles" if layout.is_fp8 else "elements"
        logger.info(
            f"ZeRO-1 bucket of {len(layout.members)} parameters over {layout.num_ranks} ranks: "
            f"{layout.real_units:,} {kind}, {layout.padding_units:,} of padding, "
            f"{layout.real_numel:,} real elements"
        )
    return zero1


def _keep_expert_bias_of_skipped_steps(
    optimizers: OptimizersContainer, model_parts: list[nn.Module], zero1s: list[Zero1]
) -> None:
    """Undo TorchTitan's load balancing in a skipped step: it changes nothing of the model."""
    biases = [
        buffer
        for part in model_parts
        for name, buffer in part.named_buffers()
        if name.endswith("expert_bias")
    ]
    if not biases:
        return
    kept = [torch.empty_like(bias) for bias in biases]
    skipped_before = 0

    def skipped_steps() -> int:
        return sum(zero1.skipped_steps for zero1 in zero1s)

    def keep(*args: Any) -> None:
        torch._foreach_copy_(kept, biases)

    def restore(*args: Any) -> None:
        nonlocal skipped_before
        if skipped_steps() > skipped_before:
            torch._foreach_copy_(biases, kept)
            skipped_before = skipped_steps()

    # TorchTitan's balancing is a pre-hook that is registered already: run before it.
    optimizers.register_step_pre_hook(keep)
    optimizers._optimizer_step_pre_hooks.move_to_end(
        next(reversed(optimizers._optimizer_step_pre_hooks)), last=False
    )
    optimizers.register_step_post_hook(restore)
