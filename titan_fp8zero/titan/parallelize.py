"""`shard_zero1` in place of FSDP2: TorchTitan's own `parallelize_*`, with `apply_fsdp` swapped.

TP, EP, activation checkpointing and compile stay stock. Parameters are sharded in two stages. Here,
on the meta device, each becomes the DTensor that FSDP2 would make of it, so that initialization
draws the same bits as in a stock run. `optimizers.py` re-lays them as main parameters afterwards.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_fp8zero.titan.config import BlockwiseFP8, options_of
from titan_fp8zero.titan.converter import CONVERTER
from titan_fp8zero.titan.refuse import refuse_unsupported
from titan_fp8zero.titan.swap import swapped

EXPERT_SHARD_DIM = "efsdp"


@dataclass(frozen=True)
class Sharding:
    """What `shard_zero1` needs to know of a model part, once its weights are initialized."""

    options: BlockwiseFP8
    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None
    compute_dtype: torch.dtype
    gradient_dtype: torch.dtype
    backwards_per_step: int


def sharding_of(model_part: nn.Module) -> Sharding | None:
    """How `parallelize` wants a model part sharded; None for a part that stays stock."""
    return getattr(model_part, "_zero1_sharding", None)


def parallelize_with(stock: Callable[..., nn.Module], *modules: ModuleType) -> Callable:
    """A stock `parallelize_fn` that stages parameters for ZeRO-1 where it would apply FSDP2.

    `modules` are those that bind `apply_fsdp` by name for this model.
    """

    @functools.wraps(stock)
    def parallelize(
        model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
    ) -> nn.Module:
        if CONVERTER not in job_config.model.converters:
            return stock(model, parallel_dims, job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            logger.info("Seed checkpoint: the model keeps its whole, unsharded parameters")
            return stock(model, parallel_dims, job_config)
        refuse_unsupported(job_config, parallel_dims)
        for module in modules:  # selective activation checkpointing saves results of GEMMs
            module._op_sac_save_list.add(torch.ops.titan_fp8zero.fp8_gemm_nt.default)
        meshes: dict[str, DeviceMesh | None] = {"mesh": None, "expert_mesh": None}

        def stage(model: nn.Module, dp_mesh: DeviceMesh, **fsdp_options: Any) -> None:
            meshes["mesh"] = dp_mesh
            meshes["expert_mesh"] = fsdp_options.get("edp_mesh")
            _stage_parameters(model, dp_mesh, meshes["expert_mesh"])

        with swapped(modules, "apply_fsdp", stage):
            model = stock(model, parallel_dims, job_config)
        if parallel_dims.fsdp_enabled and meshes["mesh"] is None:
            raise RuntimeError(
                f"{stock.__name__} did not call apply_fsdp: its ranks would train apart"
            )
        sharding = Sharding(
            options=options_of(job_config),
            compute_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            gradient_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
            backwards_per_step=_backwards_per_step(job_config, parallel_dims),
            **meshes,
        )
        model.__dict__["_zero1_sharding"] = sharding
        _cast_inputs(model, sharding.compute_dtype)
        if not parallel_dims.fsdp_enabled:
            _disable_autocast(model)
        return model

    return parallelize


def _backwards_per_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """Gradient accumulation steps, as the trainer computes them.

    The trainer never says which micro-batch is the last, so that they are counted.
    """
    training = job_config.training
    if training.global_batch_size < 0:
        return 1
    batch_degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
    return training.global_batch_size // (training.local_batch_size * batch_degree)


def _stage_parameters(
    model: nn.Module, dp_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> None:
    staged: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in staged:
                sharded = (
                    _shard_expert_weight(parameter, expert_mesh)
                    if isinstance(parameter, DTensor)
                    else distribute_tensor(
                        parameter.data,
                        dp_mesh,
                        [*_replicated(dp_mesh), Shard(0)],
                        src_data_rank=None,
                    )
                )
                staged[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
            module.register_parameter(name, staged[id(parameter)])


def _replicated(dp_mesh: DeviceMesh) -> list[Placement]:
    return [Replicate()] * (dp_mesh.ndim - 1)


def _shard_expert_weight(parameter: DTensor, expert_mesh: DeviceMesh | None) -> DTensor:
    """An EP weight, on ("ep",) as `Shard(0)`, sharded over efsdp too as FSDP2 would."""
    assert expert_mesh is not None, "TorchTitan makes one wherever it shards experts"
    mesh = DeviceMesh._concatenate([expert_mesh, parameter.device_mesh])
    ranks = expert_mesh[EXPERT_SHARD_DIM].size()
    rank = expert_mesh[EXPERT_SHARD_DIM].get_local_rank()
    ep_degree = parameter.device_mesh.size()
    # TorchTitan shards dim 1 where there are more ranks than experts.
    dim = 1 if ranks * ep_degree > parameter.shape[0] else 0
    shard = Shard(1) if dim == 1 else _StridedShard(0, split_factor=ep_degree)
    local = parameter.to_local()
    chunks = torch.chunk(local, ranks, dim)
    return DTensor.from_local(
        chunks[rank] if rank < len(chunks) else local.narrow(dim, 0, 0),
        mesh,
        [*_replicated(expert_mesh), shard, *parameter.placements],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what each block is given to the compute dtype, as FSDP2's mixed precision does."""
    if dtype == torch.float32:
        return

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def cast_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    heads = [module for module in (model.norm, model.output) if isinstance(module, nn.Module)]
    for module in [model, *model.get_submodule("layers").children(), *heads]:
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def _disable_autocast(model: nn.Module) -> None:
    """On one rank TorchTitan turns autocast on; compute weights have the compute dtype already."""
    entered: list[torch.autocast] = []

    def enter(module: nn.Module, args: tuple) -> None:
        entered.append(torch.autocast(next(module.parameters()).device.type, enabled=False))
        entered[-1].__enter__()

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        entered.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
