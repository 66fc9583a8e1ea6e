"""Our functions as ops of torch's dispatcher, opaque to torch.compile.

`torch.library.custom_op` would do, but for its Python layers around every call (checks of aliasing,
autograd, dynamo): on the GPU machines we measured they cost as much time of the CPU as a kernel's
launch and more, and a compiled block calls dozens of ops.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

_LIBRARY = torch.library.Library("titan_fp8zero", "DEF")


def define_op(
    *, cuda: Callable[..., Any] | None = None, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], OpOverload]:
    """Make the decorated function an op of its name: on all devices, or where there is a `cuda`
    function, on CPUs.

    The schema is inferred from its annotations. Ops have no derivative, and return tensors that
    alias none of their arguments. `fake_of` must describe the result.
    """

    def define(function: Callable[..., Any]) -> OpOverload:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        arguments = list(inspect.signature(function).parameters)
        mutated = [arguments.index(argument) for argument in mutates_args]
        kernels: dict[str, Callable[..., Any]] = {"CompositeExplicitAutograd": function}
        if cuda is not None:
            kernels = {"CPU": function, "CUDA": cuda}
        for key, kernel in kernels.items():
            _LIBRARY.impl(name, _counting_versions(kernel, mutated) if mutated else kernel, key)
        op: OpOverload = getattr(torch.ops.titan_fp8zero, name).default
        return op

    return define


def fake_of(op: OpOverload) -> Callable[[Callable[..., Any]], None]:
    """Decorates the function that returns empty tensors like those an op returns."""

    def register(fake: Callable[..., Any]) -> None:
        torch.library.register_fake(op, fake, lib=_LIBRARY)

    return register


def _counting_versions(kernel: Callable[..., Any], mutated: list[int]) -> Callable[..., Any]:
    # Autograd then refuses a backward that would read what was overwritten after its forward.
    def run(*args: Any) -> Any:
        for position in mutated:
            increment_version(args[position])
        return kernel(*args)

    return run
