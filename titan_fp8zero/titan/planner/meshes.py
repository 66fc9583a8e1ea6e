"""TorchTitan's device meshes for a job that is not running: any size, no process group."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchtitan.distributed.parallel_dims as parallel_dims
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims

from titan_fp8zero.job import Job
from titan_fp8zero.titan.swap import swapped


class GrouplessMesh(DeviceMesh):
    """A device mesh that knows its ranks and dims; nothing can communicate over it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "_init_backend": False})

    @property
    def _dim_group_names(self) -> list[Any]:
        return [""] * self.ndim

    @_dim_group_names.setter
    def _dim_group_names(self, names: list[Any]) -> None:
        """Torch hands the names of a mesh on to what is sliced or concatenated from it."""

    @staticmethod
    def _init_process_groups(*args: Any, **kwargs: Any) -> list[Any]:
        return []

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        return None

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        coordinate = self.get_coordinate()
        assert coordinate is not None, "a slice holds the rank that it was made for"
        if isinstance(mesh_dim, str):
            assert self.mesh_dim_names is not None
            mesh_dim = self.mesh_dim_names.index(mesh_dim)
        return coordinate[mesh_dim or 0]


@contextmanager
def meshes_of_rank(rank: int) -> Iterator[None]:
    """Inside a `with` block, meshes are made and sliced as `rank` of the job would."""
    with (
        swapped((device_mesh,), "DeviceMesh", GrouplessMesh),
        swapped((device_mesh,), "get_rank", lambda group=None: rank),
        swapped((parallel_dims,), "init_device_mesh", _init_device_mesh),
    ):
        yield


def _init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    # On the meta device, so that it equals no mesh of a running job.
    ranks = torch.arange(math.prod(mesh_shape)).view(mesh_shape)
    return GrouplessMesh("meta", ranks, mesh_dim_names=mesh_dim_names)


def parallel_dims_of(job: Job) -> ParallelDims:
    """A job's degrees, as the trainer reads them."""
    parallelism = job.config.parallelism
    return ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=job.nproc,
    )
