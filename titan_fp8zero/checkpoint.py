"""State for distributed checkpoints (DCP), in each weight's own coordinates.

A rank owns runs of a weight's units, and a run is a few boxes of the weight (at most 3 of a
matrix, 5 of a stack of matrices). So a weight and its moments are saved as boxes of `[R, C]`,
`[E, R, C]` or any other shape, under their own names: checkpoints do not depend on ranks, mesh,
strategy or bucket size, and FSDP2 can load what we save and we what it saves.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn as nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from titan_fp8zero.blocks import BLOCK, fold, scale_shape, unfold
from titan_fp8zero.main_parameter import MainParameter, Weight, local_tensor, main_of

aten = torch.ops.aten


class Box(NamedTuple):
    """A rectangular part of a grid."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes_of_run(start: int, end: int, grid: tuple[int, ...]) -> Iterator[Box]:
    """Boxes that cover cells `[start, end)` of a row-major grid, in order.

    At most `2 * len(grid) - 1` of them: rows that the run covers whole are one box, a part of a
    row before and after them are runs of a grid of one dim less.
    """
    if start == end:
        return
    if not grid:
        yield Box((), ())
        return
    row = prod(grid[1:])
    first_whole, end_whole = -(-start // row), end // row
    if first_whole > end_whole:
        yield from _boxes_in_row(end_whole, start % row, end % row, grid)
        return
    yield from _boxes_in_row(first_whole - 1, start - (first_whole - 1) * row, row, grid)
    if first_whole < end_whole:
        yield Box((first_whole, *[0] * len(grid[1:])), (end_whole - first_whole, *grid[1:]))
    yield from _boxes_in_row(end_whole, 0, end % row, grid)


def _boxes_in_row(row: int, start: int, end: int, grid: tuple[int, ...]) -> Iterator[Box]:
    for box in boxes_of_run(start, end, grid[1:]):
        yield Box((row, *box.offset), (1, *box.size))


class Geometry(NamedTuple):
    """The part of a weight that one model-parallel rank holds, and where it lies in the whole."""

    shape: tuple[int, ...]
    """Of the whole weight."""
    offset: tuple[int, ...]
    """Of the part, in the whole weight."""
    local_shape: tuple[int, ...]
    """Of the part."""
    is_tiled: bool
    """Whether units are tiles, or elements."""

    @property
    def grid(self) -> tuple[int, ...]:
        """The units of the part, row-major."""
        return scale_shape(self.local_shape) if self.is_tiled else self.local_shape

    def box_of(self, cells: Box) -> Box:
        """A box of the grid as one of the whole weight, clipped at the part's edge."""
        offset, size = [], []
        for dim, (cell, count) in enumerate(zip(cells.offset, cells.size, strict=True)):
            edge = BLOCK if self.is_tiled and dim >= len(self.shape) - 2 else 1
            offset.append(self.offset[dim] + cell * edge)
            size.append(min(count * edge, self.local_shape[dim] - cell * edge))
        return Box(tuple(offset), tuple(size))


class UnitRun(NamedTuple):
    """Units of a weight that this rank owns; the first one is unit `start` of the weight."""

    start: int
    units: torch.Tensor


class TensorWrapper(torch.Tensor):
    """A tensor's shape, dtype and device; subclasses know where the values are."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class WeightView(TensorWrapper):
    """This rank's part of a weight or moment, as DCP saves and loads it, in place.

    It has the whole weight's shape. Saving builds one box at a time; loading writes through to
    the units. `clone`, `to` and `deepcopy` give a view of copied units; other operations raise
    NotImplementedError.
    """

    @staticmethod
    def __new__(
        cls,
        geometry: Geometry,
        runs: tuple[UnitRun, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight: Weight | None = None,
    ) -> "WeightView":
        return torch.Tensor._make_wrapper_subclass(cls, geometry.shape, dtype=dtype, device=device)

    def __init__(
        self,
        geometry: Geometry,
        runs: tuple[UnitRun, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight: Weight | None = None,
    ) -> None:
        self._geometry = geometry
        self._runs = runs
        self._weight = weight
        self._is_loading = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        view = args[0]
        options = kwargs or {}
        dtype, device = options.get("dtype") or view.dtype, options.get("device") or view.device
        if function is aten.detach.default:
            return view
        if function in (aten.clone.default, aten._to_copy.default):
            return view._copied(dtype, device)
        if function is aten.copy_.default and isinstance(args[1], WeightView):
            return view._copy_runs(args[1])
        if function is aten.new_empty.default:
            # Asynchronous saves make a view this way, and then fill it with copied attributes.
            return torch.Tensor._make_wrapper_subclass(cls, args[1], dtype=dtype, device=device)
        raise NotImplementedError(f"{function} of {view}")

    def _copied(self, dtype: torch.dtype, device: torch.device) -> "WeightView":
        runs = tuple(
            UnitRun(run.start, run.units.to(device, dtype, copy=True)) for run in self._runs
        )
        return WeightView(self._geometry, runs, dtype, device, self._weight)

    def _copy_runs(self, source: "WeightView") -> "WeightView":
        places = [[(run.start, len(run.units)) for run in view._runs] for view in (self, source)]
        if places[0] != places[1]:
            raise ValueError(
                f"this rank owns units {places[0]} (start, count) of a weight of shape "
                f"{tuple(self.shape)}, but the state has {places[1]}: save and load through "
                "torch.distributed.checkpoint to change the ranks or the strategy"
            )
        for run, source_run in zip(self._runs, source._runs, strict=True):
            run.units.copy_(source_run.units)
        return self

    def copy_whole(self, whole: torch.Tensor) -> None:
        """Load this rank's units from the whole weight, a plain tensor."""
        offset, size = self._geometry.offset, self._geometry.local_shape
        ends = (start + length for start, length in zip(offset, size, strict=True))
        self.copy_local(
            whole[tuple(slice(start, end) for start, end in zip(offset, ends, strict=True))]
        )

    def copy_local(self, local: torch.Tensor) -> None:
        """Load this rank's units from the part of the weight that a model-parallel rank holds."""
        units = fold(local) if self._geometry.is_tiled else local.reshape(-1)
        for run in self._runs:
            run.units.copy_(units[run.start : run.start + len(run.units)])

    def gather_local(self) -> torch.Tensor:
        """The values of the part of the weight that a model-parallel rank holds. A collective."""
        assert self._weight is not None, "a view that was pickled belongs to no weight"
        unit = (BLOCK, BLOCK) if self._geometry.is_tiled else ()
        owned = [run.units for run in self._runs]
        return self._weight.gather(
            torch.cat([torch.empty(0, *unit, dtype=self.dtype, device=self.device), *owned])
        )

    def to_parameter(self) -> torch.Tensor:
        """The values as a tensor like the parameter before it was sharded: a plain one, or a
        DTensor with the same placements. A collective; this one weight is gathered for it."""
        local = self.gather_local()
        assert self._weight is not None
        return self._weight.mesh.scatter(local, self._weight.placements)

    def _boxes(self) -> Iterator[tuple[Box, Box, torch.Tensor]]:
        """What this rank owns: boxes of the whole weight, of the grid of units, and their units."""
        for run in self._runs:
            end = run.start + len(run.units)
            taken = 0
            for cells in boxes_of_run(run.start, end, self._geometry.grid):
                units = run.units[taken : taken + prod(cells.size)]
                taken += len(units)
                yield self._geometry.box_of(cells), cells, units

    # DCP's protocol. It asks for write items before it saves and for chunks before it loads, and
    # then in both cases for the shard at an index.

    def __create_write_items__(self, fqn: str, view: torch.Tensor) -> list[WriteItem]:
        # Replicas (HSDP) name the same boxes, of which DCP keeps one each, shared out evenly.
        self._is_loading = False
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._is_loading = True
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
            for box, _, _ in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, cells, units in self._boxes():
            if box.offset == index.offset:
                if not self._geometry.is_tiled:
                    return units.view(box.size)
                if self._is_loading:
                    return TileBox(units.unflatten(0, cells.size), (0,) * len(box.size), box.size)
                return unfold(units, box.size)
        raise KeyError(f"{index.fqn}: this rank owns no box at {index.offset}")


class TileBox(TensorWrapper):
    """A box of a tiled weight: what is copied into it, or into a slice of it, goes to the tiles."""

    @staticmethod
    def __new__(
        cls, tiles: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> "TileBox":
        return torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=tiles.dtype, device=tiles.device
        )

    def __init__(self, tiles: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> None:
        self._tiles = tiles
        """`[..., tile rows, tile columns, 128, 128]`."""
        self._offset = offset
        """Of this slice in the box, elements."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        box = args[0]
        if function is aten.detach.default:
            return box
        if function is aten.slice.Tensor:
            return box._slice(*args[1:4])
        if function is aten.copy_.default:
            for strip, values in box._strips(args[1].expand(box.shape)):
                strip._write(values)
            return box
        raise NotImplementedError(f"{function} of {box}")

    def _slice(self, dim: int, start: int, end: int) -> "TileBox":
        offset, size = list(self._offset), list(self.shape)
        offset[dim] += start
        size[dim] = end - start
        return TileBox(self._tiles, tuple(offset), tuple(size))

    def _strips(
        self, values: torch.Tensor, dim: int = 0
    ) -> Iterator[tuple["TileBox", torch.Tensor]]:
        """This slice and what goes into it, one row of tiles at a time: little is unfolded then."""
        if dim == len(self.shape) - 1:
            yield self, values
            return
        edge = BLOCK if dim == len(self.shape) - 2 else 1
        start = 0
        while start < self.shape[dim]:
            end = min(self.shape[dim], start + edge - (self._offset[dim] + start) % edge)
            part = values.narrow(dim, start, end - start)
            yield from self._slice(dim, start, end)._strips(part, dim + 1)
            start = end

    def _write(self, values: torch.Tensor) -> None:
        """Unfold the tiles that the slice touches, change them, and fold them back."""
        touched, within = [], []
        for dim, (start, size) in enumerate(zip(self._offset, self.shape, strict=True)):
            edge = BLOCK if dim >= len(self.shape) - 2 else 1
            first = start // edge
            touched.append(slice(first, -(-(start + size) // edge)))
            within.append(slice(start - first * edge, start - first * edge + size))
        rows = self._tiles[tuple(touched)].transpose(-3, -2)  # [..., tile rows, 128, columns, 128]
        weight = rows.clone(memory_format=torch.contiguous_format).flatten(-2).flatten(-3, -2)
        weight[tuple(within)] = values
        rows.copy_(weight.view(rows.shape))


def weight_view(weight: Weight, tensor: torch.Tensor) -> WeightView:
    """A weight's part of its main parameter, or of a moment of the main parameter's shape."""
    local = local_tensor(tensor.detach())
    runs = []
    for run in weight.main.owned_runs(weight):
        start = run.local_start - weight.main.layout.local_start
        runs.append(UnitRun(run.start, local[start : start + run.units]))
    shape, offset = weight.mesh.whole_of(weight.shape)
    geometry = Geometry(shape, offset, weight.shape, weight.is_fp8)
    return WeightView(geometry, tuple(runs), local.dtype, local.device, weight)


def use_weight_views(weights: list[Weight]) -> None:
    """Let the modules that own these weights save and load `WeightView`s of them.

    `state_dict()` then has every weight, tied and pooled ones too, in its own shape, and
    `load_state_dict()` takes such views, those that DCP has loaded in place or copies of them, or
    whole weights as plain tensors or as DTensors like the original parameters.
    """
    for weight in weights:
        for module, name in weight.readers:
            module.register_state_dict_post_hook(partial(_put_view, weight, name))
            module.register_load_state_dict_pre_hook(partial(_take_view, weight, name))


def _put_view(
    weight: Weight,
    name: str,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    state_dict[prefix + name] = weight_view(weight, weight.parameter)


def _take_view(
    weight: Weight,
    name: str,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *args: Any,
) -> None:
    value = state_dict.get(prefix + name)
    view = weight_view(weight, weight.parameter)
    with torch.no_grad():
        if isinstance(value, WeightView):
            view.copy_(value)
        elif isinstance(value, DTensor) and value.shape == view.shape:
            view.copy_local(weight.mesh.gather(value))
        elif _is_plain(value) and value.shape == view.shape:
            view.copy_whole(value)
        else:
            return
    state_dict[prefix + name] = weight.parameter


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    return type(value) in (torch.Tensor, nn.Parameter)


# Optimizer state.

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State and options of an optimizer of main parameters, by weight, for DCP to save or load.

    Keys are those of torch's `get_optimizer_state_dict`, flattened: `state.<fqn>.<name>` and
    `param_groups.<fqn>.<option>`. Moments are `WeightView`s, anything else (the step count) is
    copied for each weight. Weights that were never updated, because steps were skipped or no rank
    used them, get the state that they had before their first update. A collective.
    """
    _initialize_missing_state(optimizer)
    mains = _main_parameters(optimizer)
    by_weight = {}
    for key, value in get_optimizer_state_dict(model, optimizer, options=_FLAT).items():
        kind, fqn, name = _split_key(key)
        for weight in mains[fqn].weights:
            by_weight[f"{kind}.{weight.fqn}.{name}"] = _value_of(weight, value)
    return by_weight


def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Load what `optimizer_state_dict` gave, after DCP has read into it, or a copy of it.

    Raises KeyError for a missing entry, and ValueError if weights that share a main parameter
    have different step counts or options.
    """
    _initialize_missing_state(optimizer)
    mains = _main_parameters(optimizer)
    by_main: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    for key, value in by_main.items():
        kind, fqn, name = _split_key(key)
        weights = mains[fqn].weights
        loaded = {weight: state_dict[f"{kind}.{weight.fqn}.{name}"] for weight in weights}
        if _is_moment(weights[0], value):
            for weight, view in loaded.items():
                weight_view(weight, value).copy_(view)
        else:
            by_main[key] = _common_value(name, loaded)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=by_main, options=_FLAT)


@torch.no_grad()
def _initialize_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """State as before the first update, for parameters that have none; others stay as they are.

    torch's `get_optimizer_state_dict` would do so only where no parameter has any state, and leave
    a step count of 1. The optimizer's hooks do not run: nothing is skipped, counted or published.
    """
    step = inspect.unwrap(type(optimizer).step)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    gradients = [p.grad for p in parameters]
    options = [(group, group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = None
        for group, lr, _ in options:
            group.update(lr=lr * 0, weight_decay=0.0)
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
            step(optimizer)
            parameter.grad = None
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                state["step"] *= 0
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, lr, weight_decay in options:
            group.update(lr=lr, weight_decay=weight_decay)


def _main_parameters(optimizer: torch.optim.Optimizer) -> dict[str, MainParameter]:
    """Main parameters by the FQN of each weight that they hold."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    mains = [main for main in map(main_of, parameters) if main is not None]
    return {weight.fqn: main for main in mains for weight in main.weights}


def _split_key(key: str) -> tuple[str, str, str]:
    kind, rest = key.split(".", 1)
    fqn, name = rest.rsplit(".", 1)
    return kind, fqn, name


def _is_moment(weight: Weight, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == weight.parameter.shape


def _value_of(weight: Weight, value: Any) -> Any:
    if _is_moment(weight, value):
        return weight_view(weight, value)
    # A copy of its own, or DCP would load the step counts of all weights into one tensor.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _common_value(name: str, loaded: dict[Weight, Any]) -> Any:
    (first, value), *others = loaded.items()
    for weight, other in others:
        if other != value:
            raise ValueError(
                f"{first.fqn} and {weight.fqn} share a main parameter, but their {name} in the "
                f"checkpoint is {value} and {other}: load with the strategy "
                '"block" and padding_limit=inf, which pools nothing'
            )
    return value
