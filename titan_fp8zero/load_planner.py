"""A DCP load that first lists all that differs between a checkpoint and what is to be loaded."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from titan_fp8zero.checkpoint_errors import CheckpointError


@dataclass(frozen=True)
class _Request:
    """What one rank wants to load, and what of it the checkpoint has not, or has differently."""

    fqns: list[str]
    differences: list[str]


class StrictLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner, but every difference is an error, and one error lists all of them.

    It is raised on all ranks, before anything is overwritten. A difference is a missing entry, a
    tensor of another shape or dtype, and an entry of the checkpoint that no rank asks for; of the
    last kind, options of optimizers and schedulers are let pass: they differ between versions.
    Without optimizer state, floating-point weights may have another dtype and are cast.

    Args:
        not_model: names of the state dict's entries that are not of the model, which has its
            weights at the top level: "optimizer" for `optimizer.state...`. All that there may be
            in a checkpoint, of which a load may leave some out.
    """

    def __init__(self, not_model: Collection[str]) -> None:
        super().__init__()
        self._not_model = frozenset(not_model)

    def create_local_plan(self) -> LoadPlan:
        request = _Request(list(self.state_dict), list(dict.fromkeys(self._differences())))
        # DCP stops at the first difference that it meets.
        plan = LoadPlan([]) if request.differences else super().create_local_plan()
        return replace(plan, planner_data=request)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        requests = [plan.planner_data for plan in global_plan]
        differences = dict.fromkeys(line for request in requests for line in request.differences)
        differences.update(dict.fromkeys(self._left_over(requests)))
        if differences:
            raise CheckpointError(
                "the checkpoint does not fit this run, nothing was loaded:\n  "
                + "\n  ".join([*differences, *_advice(differences)])
            )
        return super().create_global_plan(
            [replace(plan, planner_data=None) for plan in global_plan]
        )

    def _differences(self) -> Iterator[str]:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        stored_states = {self._state_of(fqn) for fqn in stored}
        may_cast = not any(self._state_of(fqn) == "optimizer" for fqn in self.state_dict)
        for fqn, value in self.state_dict.items():
            state = self._state_of(fqn)
            if state is not None and state not in stored_states:
                yield f"{state}: missing in the checkpoint"  # once, not for every entry of it
                continue
            if fqn not in stored:
                yield f"{fqn}: missing in the checkpoint"
                continue
            entry = stored[fqn]
            if isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
                yield from _tensor_differences(fqn, value, entry, may_cast)
            elif isinstance(value, torch.Tensor) or isinstance(entry, TensorStorageMetadata):
                yield f"{fqn}: a tensor only in the checkpoint, or only here"

    def _left_over(self, requests: list[_Request]) -> Iterator[str]:
        assert self.metadata is not None
        wanted = {fqn for request in requests for fqn in request.fqns}
        loaded_states = {self._state_of(fqn) for fqn in wanted}
        for fqn in self.metadata.state_dict_metadata.keys() - wanted:
            state = self._state_of(fqn)
            is_option = state is not None and not fqn.startswith(
                ("optimizer.state.", "dataloader.")
            )
            if state in loaded_states and not is_option:
                yield f"{fqn}: in the checkpoint, but not here"

    def _state_of(self, fqn: str) -> str | None:
        """Which of the state dict's entries this is of; None for the model."""
        name = fqn.partition(".")[0]
        return name if name in self._not_model else None


def _tensor_differences(
    fqn: str, value: torch.Tensor, entry: TensorStorageMetadata, may_cast: bool
) -> Iterator[str]:
    stored = entry.properties.dtype
    if entry.size != value.shape:
        yield f"{fqn}: shape {tuple(entry.size)} in the checkpoint, {tuple(value.shape)} here"
    are_floats = stored.is_floating_point and value.is_floating_point()
    if stored != value.dtype and not (may_cast and are_floats):
        yield f"{fqn}: {stored} in the checkpoint, {value.dtype} here"


def _advice(differences: Collection[str]) -> Iterator[str]:
    if any(line.startswith("dataloader.") for line in differences):
        yield (
            "(The position in the data is stored for each data-parallel rank. On another number "
            "of them, start the data anew: --checkpoint.exclude_from_loading dataloader.)"
        )
    if any(": missing in the checkpoint" in d and d.startswith("optimizer") for d in differences):
        yield (
            "(A checkpoint without optimizer state, as the last of a run is unless "
            "--checkpoint.no-last-save-model-only, has weights to start from: give it as "
            "--checkpoint.initial_load_path in a new dump folder. Or resume an earlier one: "
            "--checkpoint.load_step.)"
        )
