"""Tiny models whose gradients a test chooses, and what `shard_zero1` made of them, in full."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from titan_fp8zero import BlockwiseAdamW, BlockwiseFP8Linear, Zero1, shard_zero1, unfold
from titan_fp8zero.compute_weight import FP8Weight
from titan_fp8zero.main_parameter import local_tensor, main_of

FP8_SHAPES = {
    "plain": (256, 384),
    "odd": (200, 300),
    "tall": (576, 256),
    "experts": (3, 128, 256),
    "odd_experts": (5, 130, 70),
    "one": (1, 1),
}
FLAT_SHAPES = {"norm": (97,), "small": (5,), "single": (1,), "scalar": (), "embedding": (50, 24)}
SHAPES = {**FP8_SHAPES, **FLAT_SHAPES}
SAMPLES = 12
"""Samples of a step: the same whole number for each of 1, 2, 3 and 4 ranks."""


class GivenGradient(nn.Module):
    """A weight whose gradient is what forward is given, to the bit."""

    def __init__(self, shape: tuple[int, ...], *, fp8: bool, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))
        if fp8:
            self.fp8_weights = ("weight",)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        bound = self.__dict__.get("_compute_weights", {}).get("weight")
        leaf = bound.carrier if isinstance(bound, FP8Weight) else self.weight
        leaf = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        return (leaf * gradient.to(leaf.dtype)).sum()


class GivenGradients(nn.Module):
    """Weights by name; a backward uses those that it is given a gradient for."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.weights = nn.ModuleDict(
            {
                name: GivenGradient(shape, fp8=name not in FLAT_SHAPES, seed=seed)
                for seed, (name, shape) in enumerate(shapes.items())
            }
        )
        self.shapes = shapes

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(self.weights[name](gradient).float() for name, gradient in gradients.items())


def exact_gradients(
    shapes: dict[str, tuple[int, ...]], step: int, samples: Iterable[int]
) -> dict[str, torch.Tensor]:
    """The sum over samples of small integers times a power of two: exact in any order and in bf16.

    12 samples of at most 8 sum to less than 256. Not to be written to.
    """
    return _exact_gradients(tuple(shapes.items()), step, tuple(samples))


@functools.lru_cache(maxsize=8)
def _exact_gradients(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], step: int, samples: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    gradients = {}
    for index, (name, shape) in enumerate(shapes):
        total = torch.zeros(shape)
        for sample in samples:
            generator = torch.Generator().manual_seed(1000 * step + 50 * index + sample)
            total += torch.randint(-8, 9, shape, generator=generator)
        gradients[name] = total * 2.0 ** -(index % 4)
    return gradients


def my_samples() -> range:
    """The samples of this rank, all of them outside a process group."""
    if not dist.is_initialized():
        return range(SAMPLES)
    return range(dist.get_rank(), SAMPLES, dist.get_world_size())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=True),
    "blockwise_foreach": lambda p: BlockwiseAdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "blockwise_fused": lambda p: BlockwiseAdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
}


def shard(
    model: nn.Module, mesh: Any, optimizer: str = "foreach", **options: Any
) -> tuple[Zero1, torch.optim.Optimizer]:
    """Shard a model and attach an optimizer of its main parameters."""
    options.setdefault("compute_dtype", torch.float32)
    zero1 = shard_zero1(model, mesh, **options)
    built = OPTIMIZERS[optimizer](model.parameters())
    zero1.attach(built)
    return zero1, built


def compute_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What forward reads: codes and scale_inv, or values; clones."""
    for main in map(main_of, model.parameters()):
        if main is not None:
            main.owner.wait_for_publish()
    found = {}
    for module_name, module in model.named_modules():
        for name, compute in module.__dict__.get("_compute_weights", {}).items():
            if isinstance(compute, FP8Weight):
                found[f"{module_name}.{name}.codes"] = compute.codes.view(torch.uint8).clone()
                found[f"{module_name}.{name}.scale_inv"] = compute.scale_inv.clone()
            else:
                found[f"{module_name}.{name}.values"] = local_tensor(compute.detach()).clone()
    return found


def main_values(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Main parameters and optimizer state in the weights' own coordinates, gathered; a collective.

    Of weights with data-parallel meshes only.
    """
    found = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            fqn = f"{module_name}.{name}"
            main = main_of(parameter)
            members = [m for m in main.layout.members if m.weight.fqn == fqn]
            if not members:
                continue  # a second reader of a tied weight
            (member,) = members
            shape = getattr(module._compute_weights[name], "codes", module._compute_weights[name])
            shape = tuple(shape.shape)
            tensors = {"main": parameter.detach()}
            if optimizer is not None:
                tensors |= optimizer.state.get(parameter, {})
            for key, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape:
                    found[f"{fqn}.{key}"] = tensor
                    continue
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                units = full[member.start : member.start + member.weight.units]
                is_fp8 = member.weight.is_fp8
                found[f"{fqn}.{key}"] = (
                    unfold(units, shape) if is_fp8 else units.view(shape)
                ).clone()
    return found


def everything(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """`compute_weights` and `main_values`."""
    return {**compute_weights(model), **main_values(model, optimizer)}


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's bits: compute weights, main parameters, optimizer state; clones."""
    tensors = list(compute_weights(model).values())
    for parameter in model.parameters():
        tensors.append(local_tensor(parameter.detach()).clone())
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                tensors.append(local_tensor(value).clone())
    return tensors


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is missing or not the same bits."""
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if name not in first or name not in second or not torch.equal(first[name], second[name])
    ]


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """AssertionError that names what differs: ranks have no rewritten asserts."""
    if names := differing(first, second):
        raise AssertionError(f"not the same bits: {', '.join(names)}")


class Block(nn.Module):
    """A residual block: RMSNorm, two FP8 linears."""

    def __init__(self, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = BlockwiseFP8Linear(dim, hidden, bias=bias)
        self.down = BlockwiseFP8Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Residual blocks between a high-precision stem and head.

    The stem makes every block's input need a gradient: compiled, they are then one graph.
    """

    def __init__(self, layers: int, dim: int = 128, hidden: int = 200) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(dim, dim, bias=False)
        self.layers = nn.ModuleList([Block(dim, hidden) for _ in range(layers)])
        self.head = nn.Linear(dim, 8, bias=False)

    def forward(self, x: torch.Tensor, eager: bool = False) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = (layer._orig_mod if eager else layer)(x)
        return self.head(x)
