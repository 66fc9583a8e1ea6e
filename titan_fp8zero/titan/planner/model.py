"""A job's weights as each pipeline rank would hold them, from a model on the meta device.

TorchTitan's own code splits the model into pipeline stages and applies TP and EP, on meshes without
process groups; ours then sees the same parameters as in training.
"""

import copy
import importlib
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.pipeline_parallel as pipeline_parallel
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import set_default_dtype

from titan_fp8zero.job import Job
from titan_fp8zero.main_parameter import Weight, collect_weights
from titan_fp8zero.titan import converter
from titan_fp8zero.titan.converter import check_converts
from titan_fp8zero.titan.model_args import model_args_of
from titan_fp8zero.titan.parallelize import Sharding, sharding_of
from titan_fp8zero.titan.planner.meshes import meshes_of_rank, parallel_dims_of
from titan_fp8zero.titan.swap import swapped


@dataclass(frozen=True)
class ModelPart:
    """What one `shard_zero1` of a rank is given."""

    stage: int
    """Pipeline stage; 0 without a pipeline."""
    weights: list[Weight]
    sharding: Sharding


class Model:
    """The whole model of a job, on the meta device."""

    def __init__(self, job: Job) -> None:
        """Raises BadInput where the config names no model of ours, or does not convert it."""
        if job.config.experimental.custom_import:
            importlib.import_module(job.config.experimental.custom_import)
        check_converts(job, "plan")
        self._job = job
        self._dims = parallel_dims_of(job)
        self._spec = get_train_spec(job.config.model.name)
        self._args = model_args_of(job.config, self._spec)
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job.config.training.dtype]):
            self._whole = self._spec.model_cls(self._args)
        # A plan multiplies nothing: any backend does.
        with swapped((converter,), "choose_backend", lambda device, requested: "reference"):
            build_model_converters(job.config, self._dims).convert(self._whole)

    def parts_of(self, pipeline_rank: int) -> list[ModelPart]:
        """The model parts of the first rank of a pipeline rank, as `parallelize` leaves them."""
        dims = replace(self._dims)  # meshes are those of one rank
        first = pipeline_rank * (dims.world_size // dims.pp)  # pp is the outermost dim
        with meshes_of_rank(first):
            dims.build_mesh()
            if not dims.pp_enabled:
                whole = copy.deepcopy(self._whole)
                return [_part(0, self._spec.parallelize_fn(whole, dims, self._job.config))]
            stages, parts = self._split_into_stages(dims)
            return [_part(stage, part) for stage, part in zip(stages, parts, strict=True)]

    def _split_into_stages(self, dims: ParallelDims) -> tuple[list[int], list[nn.Module]]:
        stages: list[int] = []

        def note_stage(model: nn.Module, index: int, num_stages: int, *_: Any, **__: Any) -> Any:
            stages.append(index)
            return SimpleNamespace(is_first=index == 0, is_last=index == num_stages - 1)

        module = (pipeline_parallel,)
        assert self._spec.pipelining_fn is not None
        with (
            swapped(module, "PipelineStage", note_stage),
            swapped(module, "build_pipeline_schedule", lambda *_: None),
        ):
            _, parts, _, _ = self._spec.pipelining_fn(
                self._whole,
                dims,
                self._job.config,
                torch.device("meta"),
                self._args,
                self._spec.parallelize_fn,
                lambda *_: None,
            )
        return stages, parts


def _part(stage: int, model: nn.Module) -> ModelPart:
    sharding = sharding_of(model)
    assert sharding is not None, "the config converts the model"
    weights = collect_weights(model, sharding.mesh, sharding.expert_mesh)
    return ModelPart(stage, weights, sharding)
