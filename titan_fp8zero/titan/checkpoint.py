"""TorchTitan's optimizers container, with state in the weights' own coordinates."""

from typing import Any

from torchtitan.components.optimizer import OptimizersContainer

from titan_fp8zero.checkpoint import load_optimizer_state_dict, optimizer_state_dict


class MainParameterOptimizers(OptimizersContainer):
    """Optimizers of main parameters, whose checkpoints stock TorchTitan loads, and the reverse."""

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
