"""A small model under TorchTitan's own checkpoint manager, without the rest of a trainer."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config import ConfigManager, LRScheduler

import titan_fp8zero.titan  # noqa: F401  applies the patch of the manager
from titan_fp8zero import BlockwiseAdamW, BlockwiseFP8Linear, shard_zero1
from titan_fp8zero.main_parameter import local_tensor
from titan_fp8zero.titan.container import MainParameterOptimizers


@cache
def default_options() -> Any:
    """`[checkpoint]` of a config that is merged with ours."""
    module = ["--job.custom_config_module", "titan_fp8zero.titan.config"]
    return ConfigManager().parse_args(module).checkpoint


class Position:
    """The state of a dataloader of one rank, or of what else has one."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = dict(values)


class Job:
    """A model in which every number says at which step it was saved."""

    def __init__(
        self,
        folder: str | Path,
        *,
        outputs: int = 70,
        dataloader: Position | None = None,
        **checkpoint: Any,
    ) -> None:
        model = nn.Sequential(
            BlockwiseFP8Linear(300, 400), nn.LayerNorm(400), nn.Linear(400, outputs)
        )
        model.register_buffer("expert_bias", torch.zeros(4))
        self.model = model
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        shard_zero1(model, mesh, compute_dtype=torch.float32)
        self.optimizers = MainParameterOptimizers([model], BlockwiseAdamW, {"lr": 1.0})
        self.optimizers.state_dict()  # makes the state of the optimizer
        self.train_state = Position(step=0)
        options = {"enable": True, "interval": 1, "keep_latest_k": 0, **checkpoint}
        self.manager = CheckpointManager(
            dataloader=dataloader,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=build_lr_schedulers(self.optimizers, LRScheduler(), 10**6),
            states={"train_state": self.train_state},
            checkpoint_config=replace(default_options(), **options),
            sd_adapter=None,
            base_folder=str(folder),
        )

    @property
    def step(self) -> int:
        return self.train_state.values["step"]

    def numbers(self) -> list[torch.Tensor]:
        (optimizer,) = self.optimizers
        states = [value for state in optimizer.state.values() for value in state.values()]
        parameters = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        return [local_tensor(tensor) for tensor in [*parameters, *states]]

    def load(self, step: int = -1) -> int:
        """The step that was loaded, 0 for none; ValueError where not all is of that step."""
        if self.manager.load(step):
            self.check_numbers()
        return self.step

    def check_numbers(self) -> None:
        found = {number for tensor in self.numbers() for number in tensor.unique().tolist()}
        if found - {0.0} != {float(self.step)}:  # padding is 0
            raise ValueError(f"step {self.step} has numbers of steps {sorted(found)}")

    def save_next(self) -> int:
        """Returns the latest step that is known to be saved."""
        step = self.step + 1
        self.train_state.values["step"] = step
        for tensor in self.numbers():
            tensor.fill_(step)
        self.manager.save(step)
        return step if self.manager.save_future is None else step - 1
