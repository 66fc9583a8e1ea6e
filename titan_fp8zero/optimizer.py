"""`BlockwiseAdamW`: AdamW that quantizes each tile it updates, in the same pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from titan_fp8zero.main_parameter import local_tensor, main_of


class BlockwiseAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) on main parameters, with the result and the state of torch's.

    Each main parameter is updated on its local units and quantized (or cast) at once into what it
    publishes, so that publishing starts with the all-gather. Gradients are clipped inside the
    update: `clip_grad_norm_` leaves them as they are and hands the factor over.

    Takes the arguments of `torch.optim.AdamW`; `amsgrad`, `maximize`, `differentiable`,
    `capturable` and a tensor as `lr` raise ValueError.
    """

    def __init__(self, params: Any, lr: float = 1e-3, **kwargs: Any) -> None:
        super().__init__(params, lr=lr, **kwargs)
        self.clip_factor: torch.Tensor | None = None
        """0-dim: what the next step multiplies gradients by."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError for an unsupported option."""
        _refuse_unsupported({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; ValueError for an unsupported option, before anything is loaded."""
        for group in state_dict["param_groups"]:
            _refuse_unsupported(group)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update and quantize every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.clip_factor = None
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self._state_of(parameter, group)
        gradient = local_tensor(parameter.grad)
        if self.clip_factor is not None:
            gradient = gradient * self.clip_factor
        local = local_tensor(parameter.detach())
        beta1, beta2 = group["betas"]
        adamw(
            [local],
            [gradient],
            [local_tensor(state["exp_avg"])],
            [local_tensor(state["exp_avg_sq"])],
            [],
            [state["step"]],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        main = main_of(parameter)
        if main is not None:
            main.payload.write(local)

    def _state_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            # The fused kernel counts steps on the device, the others on the host, as in torch.
            device = local_tensor(parameter).device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state


def _refuse_unsupported(group: dict[str, Any]) -> None:
    for name in ("amsgrad", "maximize", "differentiable", "capturable"):
        if group.get(name):
            raise ValueError(f"BlockwiseAdamW does not support {name}=True: use torch's AdamW")
    if isinstance(group["lr"], torch.Tensor):
        raise ValueError("BlockwiseAdamW needs lr as a float, got a tensor")
