"""Builds TorchTitan's own optimizers container on main parameters."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn as nn
import torchtitan.components.optimizer as stock_optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_fp8zero.optimizer import BlockwiseAdamW
from titan_fp8zero.titan.container import MainParameterOptimizers
from titan_fp8zero.titan.parallelize import Sharding, sharding_of
from titan_fp8zero.titan.swap import swapped
from titan_fp8zero.zero1 import shard_zero1


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
        container: type[OptimizersContainer] = OptimizersContainer
        moment_dtype = "float32"
        for part in model_parts:
            sharding = sharding_of(part)
            if sharding is not None:
                _shard(part, sharding)
                container = MainParameterOptimizers
                moment_dtype = sharding.options.moment_dtype
        build_container = functools.partial(_build_container, moment_dtype)
        with (
            swapped((stock_optimizer,), "build_optimizers", build_container),
            swapped((stock_optimizer,), "OptimizersContainer", container),
        ):
            build = build_container if stock is _stock_build_optimizers else stock
            return build(model_parts, optimizer_config, parallel_dims, ft_manager)

    return build_optimizers


_stock_build_optimizers = stock_optimizer.build_optimizers


def _build_container(
    moment_dtype: str,
    model_parts: list[nn.Module],
    optimizer_config: OptimizerConfig,
    parallel_dims: ParallelDims,
    ft_manager: Any = None,
) -> OptimizersContainer:
    """TorchTitan's `build_optimizers`, which knows BlockwiseAdamW besides its own."""
    if optimizer_config.name != "BlockwiseAdamW":
        if moment_dtype != "float32":
            raise ValueError(
                f'[blockwise_fp8] moment_dtype = "{moment_dtype}" needs [optimizer] name = '
                f'"BlockwiseAdamW", got "{optimizer_config.name}"'
            )
        return _stock_build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
    return stock_optimizer.OptimizersContainer(
        model_parts,
        BlockwiseAdamW,
        {
            "lr": optimizer_config.lr,
            "betas": (optimizer_config.beta1, optimizer_config.beta2),
            "eps": optimizer_config.eps,
            "weight_decay": optimizer_config.weight_decay,
            "moment_dtype": TORCH_DTYPE_MAP[moment_dtype],
            "fused": optimizer_config.implementation == "fused",
            "foreach": optimizer_config.implementation == "foreach",
        },
    )


def _shard(model_part: nn.Module, sharding: Sharding) -> None:
    options = sharding.options
    zero1 = shard_zero1(
        model_part,
        sharding.mesh,
        expert_mesh=sharding.expert_mesh,
        strategy=options.strategy,
        compute_dtype=sharding.compute_dtype,
        accumulate_dtype=TORCH_DTYPE_MAP[options.accumulate_dtype],
        reduce_dtype=TORCH_DTYPE_MAP[options.reduce_dtype],
        scale_format=options.scale_format,
        round_main_to_bf16=options.main_round == "bf16",
        bucket_bytes=options.bucket_mib << 20,
        padding_limit=options.padding_limit,
        backwards_per_step=sharding.backwards_per_step,
        overlap=options.overlap,
        keep_transposed=options.transposed_weight == "cached",
    )
    for layout in zero1.layouts:
        kind = "tiles" if layout.is_fp8 else "elements"
        logger.info(
            f"ZeRO-1 bucket of {len(layout.members)} parameters over {layout.num_ranks} ranks: "
            f"{layout.real_units:,} {kind}, {layout.padding_units:,} of padding, "
            f"{layout.real_numel:,} real elements"
        )
    if uncut := zero1.weights_with_local_blocks():
        logger.info(
            f"Blocks of {len(uncut)} weights are those of tensor-parallel shards that are no whole "
            f"number of blocks, not those of the whole weight: {', '.join(uncut)}"
        )
