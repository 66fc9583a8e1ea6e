"""`BlockwiseAdamW`: AdamW that quantizes each tile it updates, in the same pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from titan_fp8zero.main_parameter import local_tensor, main_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class BlockwiseAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) on main parameters, with the result and the state of torch's.

    Each main parameter is updated on its local units and quantized (or cast) at once into what it
    publishes, so that publishing starts with the all-gather. Gradients are clipped inside the
    update: `clip_grad_norm_` leaves them as they are and hands the factor over.

    Takes the arguments of `torch.optim.AdamW`, and `moment_dtype`: fp32, or bf16, to which moments
    are then rounded after each update, which itself is in fp32. `amsgrad`, `maximize`,
    `differentiable`, `capturable` and a tensor as `lr` raise ValueError.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        moment_dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> None:
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"moment_dtype must be torch.float32 or torch.bfloat16, got {moment_dtype}"
            )
        self._moment_dtype = moment_dtype
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
        for state in self.state.values():  # torch casts to the parameter's dtype
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(self._moment_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update and quantize every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            in_one_pass = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self._init_state(parameter, group)
                if _takes_one_pass(parameter, group):
                    in_one_pass.append(parameter)
                else:
                    self._update(parameter, group)
            if in_one_pass:
                self._update_in_one_pass(in_one_pass, group)
        self.clip_factor = None
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        gradient = local_tensor(parameter.grad)
        if self.clip_factor is not None:
            gradient = gradient * self.clip_factor
        local = local_tensor(parameter.detach())
        beta1, beta2 = group["betas"]
        moments = [local_tensor(state[name]) for name in MOMENTS]
        exp_avg, exp_avg_sq = (moment.to(local.dtype) for moment in moments)
        adamw(
            [local],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
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
        if self._moment_dtype != local.dtype:
            torch._foreach_copy_(moments, [exp_avg, exp_avg_sq])
        main = main_of(parameter)
        if main is not None:
            main.payload.write(local)

    def _update_in_one_pass(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update tiles and quantize them by the kernel; nothing waits for the device."""
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1)
        hyperparameters = _hyperparameters(torch.stack(steps), group, self.clip_factor)
        for parameter, its_own in zip(parameters, hyperparameters.unbind(), strict=True):
            main = main_of(parameter)
            assert main is not None and parameter.grad is not None
            exp_avg, exp_avg_sq = (local_tensor(self.state[parameter][name]) for name in MOMENTS)
            main.payload.update_and_write(
                local_tensor(parameter.detach()),
                local_tensor(parameter.grad).contiguous(),
                exp_avg,
                exp_avg_sq,
                its_own,
                group["betas"],
                group["eps"],
            )

    def _init_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # The fused kernel counts steps on the device, the others on the host, as in torch.
            device = local_tensor(parameter).device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(
                    parameter, dtype=self._moment_dtype, requires_grad=False
                )


def _takes_one_pass(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether the kernel that updates and quantizes takes a parameter: FP8 tiles on a GPU."""
    main = main_of(parameter)
    is_tiled = main is not None and main.bucket.is_fp8
    return is_tiled and bool(group["fused"]) and local_tensor(parameter).is_cuda


def _hyperparameters(
    steps: torch.Tensor, group: dict[str, Any], clip_factor: torch.Tensor | None
) -> torch.Tensor:
    """fp32 `[N, 4]`, as `blocks.update_tiles` takes them, of parameters at these steps `[N]`."""
    beta1, beta2 = group["betas"]
    steps = steps.double()
    decay = torch.full_like(steps, 1 - group["lr"] * group["weight_decay"])
    step_size = group["lr"] / (1 - beta1**steps)
    correction = (1 - beta2**steps).rsqrt()
    clip = torch.ones_like(steps)
    if clip_factor is not None:
        clip = clip * clip_factor.to(steps.device)
    return torch.stack([decay, step_size, correction, clip], dim=1).float()


def _refuse_unsupported(group: dict[str, Any]) -> None:
    for name in ("amsgrad", "maximize", "differentiable", "capturable"):
        if group.get(name):
            raise ValueError(f"BlockwiseAdamW does not support {name}=True: use torch's AdamW")
    if isinstance(group["lr"], torch.Tensor):
        raise ValueError("BlockwiseAdamW needs lr as a float, got a tensor")
