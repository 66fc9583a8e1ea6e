"""Lets the clipping of main parameters decide whether all ranks skip the step.

The trainer calls `torchtitan.distributed.utils.clip_grad_norm_` between the last backward and the
optimizer step, with no hook around it. Stock clipping multiplies by 0 where the norm is infinite:
ranks without the bad value then see zeros, and AdamW still decays and moves their weights.
"""

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_patches.guard import check_callable, check_versions, is_applied, log_applied, mark

NAME = "clip_grad_norm"
FUNCTION = "clip_grad_norm_"


def apply() -> None:
    """Replaces `clip_grad_norm_` for main parameters; all others are clipped as in stock."""
    import torchtitan.distributed.utils as dist_utils

    from titan_fp8zero.clip import clip_grad_norm_
    from titan_fp8zero.main_parameter import main_of

    if is_applied(NAME, getattr(dist_utils, FUNCTION, None)):
        return
    check_versions(NAME)
    stock = check_callable(
        NAME,
        dist_utils,
        FUNCTION,
        (
            "parameters",
            "max_norm",
            "norm_type",
            "error_if_nonfinite",
            "foreach",
            "pp_mesh",
            "ep_enabled",
        ),
    )

    def clip_and_agree(
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        pp_mesh: DeviceMesh | None = None,
        ep_enabled: bool = False,
    ) -> torch.Tensor:
        parameters = list(parameters)
        if not any(main_of(parameter) for parameter in parameters):
            return stock(
                parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh, ep_enabled
            )
        if norm_type != 2.0:
            raise ValueError(f"main parameters are clipped by their L2 norm, got {norm_type=}")
        return clip_grad_norm_(parameters, max_norm, foreach=foreach, pp_mesh=pp_mesh)

    setattr(dist_utils, FUNCTION, mark(NAME, clip_and_agree))
    log_applied(NAME, "clipping of main parameters decides the skip of non-finite steps")
