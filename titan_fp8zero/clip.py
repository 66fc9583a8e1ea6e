"""Clipping by the total gradient norm over several meshes: the one number all ranks agree on."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_fp8zero.main_parameter import main_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Clip the gradients of main parameters by their total norm, and return it (0-dim tensor).

    `parameters` are all main parameters of one or several models (pipeline stages), ValueError
    otherwise. The norm is the one number on which all ranks agree, so it also decides the skip:
    where it is not finite no gradient is left, and the next step changes nothing on any rank.
    """
    parameters = list(parameters)
    mains = [main for main in map(main_of, parameters) if main is not None]
    owners = dict.fromkeys(main.owner for main in mains)
    expected = sum(len(zero1.main_parameters) for zero1 in owners)
    if not len(parameters) == len(mains) == expected:
        raise ValueError(
            f"clip_grad_norm_ takes all {expected} main parameters of a model and no others, got "
            f"{len(mains)} and {len(parameters) - len(mains)} other tensors"
        )
    gradients = [main.parameter.grad for main in mains if main.parameter.grad is not None]
    norm = total_norm(gradients, foreach=foreach, pp_mesh=pp_mesh)
    for zero1 in owners:
        if zero1.pending_clip_factor is not None:  # clipped before: gradients themselves were not
            norm = norm * zero1.pending_clip_factor
            break
    for zero1 in owners:
        if zero1.agree_on_norm(norm):
            zero1.clip(_clip_factor(norm, max_norm))
    return norm


@torch.no_grad()
def total_norm(
    gradients: Iterable[torch.Tensor],
    *,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """L2 norm (0-dim tensor) of all gradients of all ranks, the same number on every rank.

    A norm over DTensors of different meshes raises, so each mesh has its own, and their squares
    add up; `pp_mesh` adds the pipeline stages, which own different parameters.
    """
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = [_mesh_norm(of_mesh, foreach) for of_mesh in by_mesh.values()]
    if not norms:
        norm = torch.tensor(0.0)
    elif len(norms) == 1:
        norm = norms[0]
    else:
        norm = sum((norm**2 for norm in norms[1:]), norms[0] ** 2) ** 0.5
    if pp_mesh is not None:
        norm = norm**2
        dist.all_reduce(norm, op=dist.ReduceOp.SUM, group=pp_mesh.get_group())
        norm = norm**0.5
    return norm


def _mesh_norm(gradients: list[torch.Tensor], foreach: bool | None) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients are multiplied by: `max_norm / norm`, at most 1, as `torch.nn.utils` does."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
