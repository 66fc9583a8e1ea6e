"""`shard_zero1` in place of FSDP2: TorchTitan's own `parallelize_*`, with `apply_fsdp` swapped.

TP, EP, activation checkpointing and compile stay stock. Parameters are sharded in two stages. Here,
on the meta device, each becomes the DTensor that FSDP2 would make of it, so that initialization
draws the same bits as in a stock run. `optimizers.py` re-lays them as main parameters afterwards.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
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

EXPERT_DIM = "ep"


@dataclass(frozen=True)
class Sharding:
    """What `shard_zero1` needs to know of a model part, once its weights are initialized."""

    options: BlockwiseFP8
    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None
    compute_dtype: torch.dtype
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
        options = options_of(job_config)
        sharding = Sharding(
            options=options,
            compute_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            backwards_per_step=(
                1
                if options.accumulation == "every_microbatch"
                else backwards_per_step(job_config, parallel_dims)
            ),
            **meshes,
        )
        model.__dict__["_zero1_sharding"] = sharding
        _cast_inputs(model, sharding.compute_dtype)
        if not parallel_dims.fsdp_enabled:
            _disable_autocast(model)
        return model

    return parallelize


def backwards_per_step(job_config: JobConfig, parallel_dims: ParallelDims) -> int:
    """Gradient accumulation steps, as the trainer computes them, times pipeline micro-batches.

    Neither the trainer nor a pipeline schedule says which backward is the last: they are counted.
    """
    training, steps = job_config.training, 1
    if training.global_batch_size >= 0:
        batch_degree = parallel_dims.dp_replicate * parallel_dims.dp_shard
        steps = training.global_batch_size // (training.local_batch_size * batch_degree)
    if not parallel_dims.pp_enabled:
        return steps
    microbatch_size = job_config.parallelism.pipeline_parallel_microbatch_size
    return steps * (training.local_batch_size // microbatch_size)


def _stage_parameters(
    model: nn.Module, dp_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> None:
    staged: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in staged:
                sharded = _shard_as_fsdp2(parameter, dp_mesh, expert_mesh)
                staged[id(parameter)] = nn.Parameter(sharded, parameter.requires_grad)
            module.register_parameter(name, staged[id(parameter)])


def _shard_as_fsdp2(
    parameter: nn.Parameter, dp_mesh: DeviceMesh, expert_mesh: DeviceMesh | None
) -> DTensor:
    """A parameter as the DTensor that FSDP2 makes of it, also where TP or EP have cut it."""
    replicated: list[Placement] = [Replicate()] * (dp_mesh.ndim - 1)
    if not isinstance(parameter, DTensor):
        placements = [*replicated, Shard(0)]
        return distribute_tensor(parameter.data, dp_mesh, placements, src_data_rank=None)
    model_mesh, dim = parameter.device_mesh, 0
    if EXPERT_DIM in (model_mesh.mesh_dim_names or ()):
        assert expert_mesh is not None, "TorchTitan makes one wherever it shards experts"
        dp_mesh = expert_mesh
        # TorchTitan shards dim 1 where there are more ranks than experts.
        if dp_mesh.size(-1) * model_mesh[EXPERT_DIM].size() > parameter.shape[0]:
            dim = 1
    cuts = prod(
        model_mesh.size(mesh_dim)
        for mesh_dim, placement in enumerate(parameter.placements)
        if placement.is_shard(dim)
    )
    shard = Shard(dim) if cuts == 1 else _StridedShard(dim, split_factor=cuts)
    ranks, rank = dp_mesh.size(-1), dp_mesh.get_local_rank(-1)
    local = parameter.to_local()
    chunks = torch.chunk(local, ranks, dim)
    return DTensor.from_local(
        chunks[rank] if rank < len(chunks) else local.narrow(dim, 0, 0),
        DeviceMesh._concatenate([dp_mesh, model_mesh]),
        [*replicated, shard, *parameter.placements],
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
