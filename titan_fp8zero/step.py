"""The state of one optimizer step: whether it is skipped, and which weights it must leave alone."""

from collections.abc import Iterable

import torch

from titan_fp8zero.main_parameter import MainParameter, Weight, local_tensor, main_of


class StepState:
    """From the reduction of a step's gradients to the last optimizer's turn."""

    def __init__(self, used: Iterable[Weight] = ()) -> None:
        self.is_norm_agreed = False
        """Whether all ranks know the norm of the present gradients."""
        self.is_skipped = False
        self.used = set(used)
        """Weights for which any rank had a gradient."""
        self.stepped: set[torch.optim.Optimizer] = set()
        """Optimizers that had their turn."""
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_unused_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what an optimizer must not change: pooled weights that no rank used.

        A weight alone in its main parameter simply has no gradient then. Raises RuntimeError for
        a pooled weight that was not used in every step before.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for main in (main for main in map(main_of, parameters) if main is not None):
            is_pooled = len(main.weights) > 1
            if main.parameter.grad is None or not self.used or not is_pooled:
                continue
            main.updates += 1
            for weight in main.weights:
                if weight in self.used:
                    _count_update(weight)
                    continue
                states = optimizer.state.get(main.parameter, {}).values()
                for tensor in [main.parameter, *states]:
                    if tensor.shape == main.parameter.shape:
                        self._keep_runs(main, weight, local_tensor(tensor.detach()))

    @property
    def keeps_weights(self) -> bool:
        """Whether some of what the optimizer writes will be undone."""
        return bool(self._kept)

    def _keep_runs(self, main: MainParameter, weight: Weight, local: torch.Tensor) -> None:
        for run in main.owned_runs(weight):
            start = run.local_start - main.layout.local_start
            units = local[start : start + run.units]
            self._kept.append((units, units.clone()))

    def restore_unused_weights(self) -> bool:
        """Undo what the optimizer did to the weights kept; whether there were any."""
        kept, self._kept = self._kept, []
        for units, copy in kept:
            units.copy_(copy)
        return bool(kept)


def _count_update(weight: Weight) -> None:
    weight.updates += 1
    if weight.updates != weight.main.updates:
        others = [other.fqn for other in weight.main.weights if other is not weight]
        raise RuntimeError(
            f"{weight.fqn} had a gradient in this step but not in every step before, and it "
            f"shares a main parameter, and its step count, with {', '.join(others)}: use the "
            'strategy "block" with padding_limit=inf ([blockwise_fp8] padding_limit = inf), '
            "which pools nothing"
        )
