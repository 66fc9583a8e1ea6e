"""TorchTitan's optimizers container, for main parameters."""

from typing import Any

import torch
import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer

from titan_fp8zero.checkpoint import load_optimizer_state_dict, optimizer_state_dict
from titan_fp8zero.main_parameter import main_of
from titan_fp8zero.zero1 import Zero1


class MainParameterOptimizers(OptimizersContainer):
    """One optimizer a model part, attached to the part's `Zero1`.

    Its state is in the weights' own coordinates: stock TorchTitan loads it, and the reverse.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
    ) -> None:
        super().__init__(model_parts, optimizer_cls, optimizer_kwargs)
        self.zero1s = [_zero1_of(part) for part in model_parts]
        for zero1, optimizer in zip(self.zero1s, self.optimizers, strict=True):
            zero1.attach(optimizer)
        self._skipped_before = 0
        self._keep_expert_bias_of_skipped_steps()

    def state_dict(self) -> dict[str, Any]:
        """`state.<fqn>.<name>` and `param_groups.<fqn>.<option>` of every weight."""
        return {
            key: value
            for part, optimizer in zip(self.model_parts, self.optimizers, strict=True)
            for key, value in optimizer_state_dict(part, optimizer).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, after DCP has read into it."""
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            load_optimizer_state_dict(part, optimizer, state_dict)

    @property
    def skipped_steps(self) -> int:
        """Steps that all ranks skipped, of the part that skipped most."""
        return max(zero1.skipped_steps for zero1 in self.zero1s)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        """Go on counting from a restored checkpoint's."""
        for zero1 in self.zero1s:
            zero1.skipped_steps = count
        self._skipped_before = count

    def _keep_expert_bias_of_skipped_steps(self) -> None:
        """Undo TorchTitan's load balancing in a skipped step, which changes nothing of the model.

        Balancing is a pre-hook that TorchTitan registers on the container later than this.
        """
        biases = [
            buffer
            for part in self.model_parts
            for name, buffer in part.named_buffers()
            if name.endswith("expert_bias")
        ]
        if not biases:
            return
        kept = [torch.empty_like(bias) for bias in biases]

        def keep(*args: Any) -> None:
            torch._foreach_copy_(kept, biases)

        def restore(*args: Any) -> None:
            if self.skipped_steps > self._skipped_before:
                torch._foreach_copy_(biases, kept)
                self._skipped_before = self.skipped_steps

        self.register_step_pre_hook(keep)
        self.register_step_post_hook(restore)


def _zero1_of(model_part: nn.Module) -> Zero1:
    (owner,) = {main.owner for main in map(main_of, model_part.parameters()) if main is not None}
    return owner
