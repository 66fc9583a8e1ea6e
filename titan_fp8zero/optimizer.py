"""`BlockwiseAdamW`: AdamW that quantizes each tile it updates, in the same pass."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

from titan_fp8zero.adjacent import adjacent_runs, joined
from titan_fp8zero.main_parameter import MainParameter, local_tensor, main_of

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
        self._homes: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
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
        for parameter, state in self.state.items():  # torch casts to the parameter's dtype
            for name in MOMENTS:
                if name in state:
                    state[name] = self._take_moment(parameter, name, state[name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update and quantize every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                self._init_state(parameter, group)
            in_one_pass = [p for p in parameters if _takes_one_pass(p, group)]
            hyperparameters = self._count_steps(in_one_pass, group)
            for in_bucket in _split_by_bucket(parameters):
                if in_bucket[0] in hyperparameters:
                    self._update_in_one_pass(in_bucket, hyperparameters, group)
                else:
                    self._update(in_bucket, group)
                main = main_of(in_bucket[0])
                if main is not None:
                    main.owner.publish_written()
        self.clip_factor = None
        return loss

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        units = [local_tensor(parameter) for parameter in parameters]
        gradients = [_local_gradient(parameter) for parameter in parameters]
        if self.clip_factor is not None:
            gradients = list(torch._foreach_mul(gradients, self.clip_factor))
        moments = [local_tensor(state[name]) for name in MOMENTS for state in states]
        updated = [moment.to(units[0].dtype) for moment in moments]
        beta1, beta2 = group["betas"]
        adamw(
            units,
            gradients,
            updated[: len(units)],
            updated[len(units) :],
            [],
            [state["step"] for state in states],
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
        if self._moment_dtype != units[0].dtype:
            torch._foreach_copy_(moments, updated)
        for parameter, values in zip(parameters, units, strict=True):
            main = main_of(parameter)
            if main is not None:
                main.payload.write(values)

    def _count_steps(
        self, parameters: list[torch.Tensor], group: dict[str, Any]
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Count a step of each parameter; returns its row of `_hyperparameters`."""
        if not parameters:
            return {}
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1)
        rows = _hyperparameters(torch.stack(steps), group, self.clip_factor)
        return dict(zip(parameters, rows.unbind(), strict=True))

    def _update_in_one_pass(
        self,
        parameters: list[torch.Tensor],
        hyperparameters: dict[torch.Tensor, torch.Tensor],
        group: dict[str, Any],
    ) -> None:
        """Update tiles of a bucket and quantize them by the kernel: in one launch, where every
        main parameter has a gradient. Nothing waits for the device."""
        mains = [_known_main_of(parameter) for parameter in parameters]
        units = [local_tensor(parameter) for parameter in parameters]
        gradients = [_local_gradient(parameter).contiguous() for parameter in parameters]
        exp_avgs, exp_avg_sqs = (
            [self._local_moment(parameter, name) for parameter in parameters] for name in MOMENTS
        )
        rows = [
            hyperparameters[parameter].expand(len(tiles), -1)
            for parameter, tiles in zip(parameters, units, strict=True)
        ]
        for run in adjacent_runs([units, gradients, exp_avgs, exp_avg_sqs]):
            first, last = mains[run][0].layout.local, mains[run][-1].layout.local
            payload = mains[0].bucket.payload(slice(first.start, last.stop))
            payload.update_and_write(
                joined(units[run]),
                joined(gradients[run]),
                joined(exp_avgs[run]),
                joined(exp_avg_sqs[run]),
                torch.cat(rows[run]),
                group["betas"],
                group["eps"],
            )
        for main in mains:
            main.payload.is_fresh = True

    def _init_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # The fused kernel counts steps on the device, the others on the host, as in torch.
            device = local_tensor(parameter).device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in MOMENTS:
                state[name] = self._zero_moment(parameter, name)

    def _zero_moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        main = main_of(parameter)
        if main is None:
            return torch.zeros_like(parameter, dtype=self._moment_dtype, requires_grad=False)
        # A storage of its own: of views into another, DTensors cannot be copied or saved.
        moment = torch.from_dlpack(self._home(parameter, name).zero_())
        return main.weights[0].mesh.main_tensor(moment)

    def _home(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Where a moment of a main parameter is kept: end to end with those of the bucket's others,
        so that one launch updates them all."""
        if (parameter, name) not in self._homes:
            bucket = _known_main_of(parameter).bucket
            mains = {p: main_of(p) for group in self.param_groups for p in group["params"]}
            new = [
                main
                for p, main in mains.items()
                if main is not None and main.bucket is bucket and (p, name) not in self._homes
            ]
            new.sort(key=lambda main: main.layout.local_start)
            sizes = [main.layout.units_per_rank for main in new]
            shape = (sum(sizes), *bucket.main.shape[1:])
            units = torch.empty(shape, dtype=self._moment_dtype, device=bucket.main.device)
            for main, home in zip(new, units.split(sizes), strict=True):
                self._homes[main.parameter, name] = home
        return self._homes[parameter, name]

    def _local_moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """The local units of a moment: as part of what it lies in, if it is at home."""
        local = local_tensor(self.state[parameter][name])
        home = self._homes.get((parameter, name))
        return home if home is not None and home.data_ptr() == local.data_ptr() else local

    def _take_moment(
        self, parameter: torch.Tensor, name: str, loaded: torch.Tensor
    ) -> torch.Tensor:
        """A loaded moment, at home and in its dtype."""
        local = local_tensor(loaded)
        if main_of(parameter) is None:
            return loaded.to(self._moment_dtype)
        if local.data_ptr() == self._home(parameter, name).data_ptr():
            return loaded
        copy = local.clone()  # it may lie where another moment's home is
        moment = self._zero_moment(parameter, name)
        local_tensor(moment).copy_(copy)
        return moment


def _split_by_bucket(parameters: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Parameters by bucket, in the order of their units there; others alone."""
    buckets: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        main = main_of(parameter)
        buckets.setdefault(parameter if main is None else main.bucket, []).append(parameter)
    for in_bucket in buckets.values():
        if len(in_bucket) > 1:
            in_bucket.sort(key=lambda parameter: _known_main_of(parameter).layout.local_start)
    return buckets.values()


def _known_main_of(parameter: torch.Tensor) -> MainParameter:
    main = main_of(parameter)
    assert main is not None
    return main


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def _takes_one_pass(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether the kernel that updates and quantizes takes a parameter: FP8 tiles on a GPU."""
    main = main_of(parameter)
    is_tiled = main is not None and main.bucket.is_fp8
    return is_tiled and bool(group["fused"]) and parameter.is_cuda


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
