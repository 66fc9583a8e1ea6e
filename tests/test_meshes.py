"""HSDP, EP, TP and PP meshes on gloo ranks: the bits, and the norm, of a single process."""

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from models import GivenGradients, assert_same, compute_weights, exact_gradients, shard
from ranks import rank_outcomes, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_fp8zero import Zero1, clip_grad_norm_, quantize_blockwise, unfold
from titan_fp8zero.checkpoint import load_optimizer_state_dict, optimizer_state_dict
from titan_fp8zero.compute_weight import FP8Weight
from titan_fp8zero.main_parameter import Weight, local_tensor, main_of

pytestmark = pytest.mark.multirank

SHAPES = {
    "columnwise": (512, 200),
    "rowwise": (200, 512),
    "whole": (130, 70),
    "experts": (4, 130, 256),
    "expert_columns": (4, 256, 130),
    "norm": (97,),
    "embedding": (50, 24),
}
SAMPLES = 12
STEPS = 5
NO_CLIPPING = 1e9


class Grid(NamedTuple):
    """A mesh, and how it cuts weights: what `shard_zero1` is given, and who reads which data."""

    mesh: DeviceMesh
    data: tuple[str, ...]
    """Dims over which samples are shared out."""
    cuts: dict[str, dict[str, Placement]]
    """By weight: model-parallel dims, and the placement there."""
    zero1_mesh: tuple[str, ...]
    expert_mesh: tuple[str, ...] = ()
    stages: str = ""
    """The dim of pipeline stages."""


def _grid(shape: tuple[int, ...], names: tuple[str, ...], **fields: Any) -> Grid:
    return Grid(init_device_mesh("cpu", shape, mesh_dim_names=names), **fields)


COLUMNS, ROWS, REPLICATED = Shard(0), Shard(1), Replicate()
TENSOR_PARALLEL = {
    "columnwise": {"tp": COLUMNS},
    "rowwise": {"tp": ROWS},
    "whole": {"tp": REPLICATED},
    "norm": {"tp": REPLICATED},
    "embedding": {"tp": COLUMNS},
}
EXPERT_PARALLEL = {name: {"ep": Shard(0)} for name in ("experts", "expert_columns")}
EXPERT_TENSOR_PARALLEL = {
    "experts": {"ep": Shard(0), "tp": Shard(2)},
    "expert_columns": {"ep": Shard(0), "tp": Shard(1)},
}

GRIDS: dict[str, tuple[int, Callable[[], Grid]]] = {
    "hsdp": (
        4,
        lambda: _grid(
            (2, 2), ("outer", "dp"), data=("outer", "dp"), cuts={}, zero1_mesh=("outer", "dp")
        ),
    ),
    "tp": (2, lambda: _grid((2,), ("tp",), data=(), cuts=TENSOR_PARALLEL, zero1_mesh=())),
    "tp_dp": (
        4,
        lambda: _grid((2, 2), ("dp", "tp"), data=("dp",), cuts=TENSOR_PARALLEL, zero1_mesh=("dp",)),
    ),
    "ep_efsdp": (
        4,
        lambda: _grid(
            (2, 2),
            ("efsdp", "ep"),
            data=("efsdp", "ep"),
            cuts=EXPERT_PARALLEL,
            zero1_mesh=("dp",),
            expert_mesh=("efsdp",),
        ),
    ),
    "ep4": (
        4,
        lambda: _grid(
            (1, 4),
            ("efsdp", "ep"),
            data=("efsdp", "ep"),
            cuts=EXPERT_PARALLEL,
            zero1_mesh=("dp",),
            expert_mesh=("efsdp",),
        ),
    ),
    "etp_ep": (
        4,
        lambda: _grid(
            (1, 2, 2),
            ("dp", "ep", "tp"),
            data=("dp",),
            cuts=EXPERT_TENSOR_PARALLEL,
            zero1_mesh=("dp",),
            expert_mesh=("dp",),
        ),
    ),
    "pp_dp": (
        4,
        lambda: _grid((2, 2), ("pp", "dp"), data=("dp",), cuts={}, zero1_mesh=("dp",), stages="pp"),
    ),
    "pp_ep": (
        4,
        lambda: _grid(
            (2, 1, 2),
            ("pp", "efsdp", "ep"),
            data=("efsdp", "ep"),
            cuts=EXPERT_PARALLEL,
            zero1_mesh=("dp",),
            expert_mesh=("efsdp",),
            stages="pp",
        ),
    ),
}


def data_mesh(grid: Grid) -> DeviceMesh | None:
    """The mesh of dense weights; under EP its ranks are those of two dims."""
    if grid.zero1_mesh == ("dp",) and "dp" not in (grid.mesh.mesh_dim_names or ()):
        return grid.mesh["efsdp", "ep"]._flatten("dp")
    return grid.mesh[grid.zero1_mesh] if grid.zero1_mesh else None


def coordinate(grid: Grid, names: tuple[str, ...]) -> tuple[int, int]:
    """This rank's index over several dims, and their size."""
    index, size = 0, 1
    for name in names:
        index = index * grid.mesh[name].size() + grid.mesh[name].get_local_rank()
        size *= grid.mesh[name].size()
    return index, size


def cut(grid: Grid, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's model-parallel part of a weight or gradient."""
    for dim, placement in grid.cuts.get(name, {}).items():
        if isinstance(placement, Shard):
            parts = whole.chunk(grid.mesh[dim].size(), placement.dim)
            whole = parts[grid.mesh[dim].get_local_rank()]
    return whole


def place(grid: Grid, model: GivenGradients) -> None:
    """Weights that model parallelism cuts become DTensors over data-parallel and those dims."""
    for name, cuts in grid.cuts.items():
        if name not in model.weights:
            continue
        module = model.weights[name]
        dims = (*(grid.expert_mesh if "ep" in cuts else grid.zero1_mesh), *cuts)
        placements = [cuts.get(dim, Replicate()) for dim in dims]
        mesh = grid.mesh if dims == grid.mesh.mesh_dim_names else grid.mesh[dims]
        local = cut(grid, name, module.weight.detach()).clone()
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))


def my_shapes(grid: Grid) -> dict[str, tuple[int, ...]]:
    """The weights of this rank's pipeline stage."""
    if not grid.stages:
        return SHAPES
    stage, stages = coordinate(grid, (grid.stages,))
    return {name: s for i, (name, s) in enumerate(SHAPES.items()) if i % stages == stage}


def whole_model(shapes: dict[str, tuple[int, ...]]) -> GivenGradients:
    """As `GivenGradients(SHAPES)` has these weights, initial values too."""
    model = GivenGradients(SHAPES)
    model.weights = nn.ModuleDict({name: model.weights[name] for name in shapes})
    return model


def given(
    grid: Grid, shapes: dict[str, Any], step: int, backward: int, backwards: int
) -> dict[str, torch.Tensor]:
    """This rank's gradients of one backward: experts see tokens of all ranks that share them."""
    gradients = {}
    for name in shapes:
        dims = grid.expert_mesh if "ep" in grid.cuts.get(name, {}) else grid.data
        rank, ranks = coordinate(grid, dims)
        samples = range(rank, SAMPLES, ranks)[backward::backwards]
        gradients[name] = cut(grid, name, exact_gradients(SHAPES, step, samples)[name])
    return gradients


def state_of(model: GivenGradients, optimizer: Any) -> dict[str, torch.Tensor]:
    """By weight: codes and scales or values, main parameter and moments of the local weight."""
    found = compute_weights(model)
    for name, module in model.weights.items():
        parameter = module._parameters["weight"]  # what `module.weight` reads is a compute weight
        (weight,) = main_of(parameter).weights
        tensors = {"main": parameter.detach(), **optimizer.state[parameter]}
        del tensors["step"]
        for key, tensor in tensors.items():
            found[f"weights.{name}.{key}"] = gather_local(weight, local_tensor(tensor))
    return found


def gather_local(weight: Weight, units: torch.Tensor) -> torch.Tensor:
    """A local weight, of the units that data-parallel ranks own."""
    mesh = weight.main.bucket.mesh.shard
    rows = [units]
    if mesh is not None:
        rows = [torch.empty_like(units) for _ in range(mesh.size())]
        dist.all_gather(rows, units.contiguous(), group=mesh.get_group())
    start = weight.member.start
    mine = torch.cat(rows)[start : start + weight.member.weight.units]
    return unfold(mine, weight.shape) if weight.is_fp8 else mine.view(weight.shape)


def build(
    grid: Grid, overlap: bool = False, backwards: int = 1
) -> tuple[GivenGradients, Zero1, torch.optim.Optimizer]:
    model = whole_model(my_shapes(grid))
    place(grid, model)
    zero1, optimizer = shard(
        model,
        data_mesh(grid),
        "blockwise_foreach",
        expert_mesh=grid.mesh[grid.expert_mesh] if grid.expert_mesh else None,
        bucket_bytes=200_000,
        overlap=overlap,
        backwards_per_step=backwards,
    )
    return model, zero1, optimizer


def train_alone(
    shapes: dict[str, Any], steps: int = STEPS
) -> tuple[GivenGradients, torch.optim.Optimizer]:
    model = whole_model(shapes)
    _, optimizer = shard(model, None, "blockwise_foreach")
    for step in range(steps):
        step_alone(model, optimizer, step)
    return model, optimizer


def step_alone(model: GivenGradients, optimizer: torch.optim.Optimizer, step: int) -> None:
    everything = exact_gradients(SHAPES, step, range(SAMPLES))
    model({name: everything[name] for name in model.weights}).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_on(grid: Grid, overlap: bool, backwards: int, save_to: str = "") -> list[float]:
    """Trains on a grid; every rank compares its part with a single process. Returns the norms."""
    shapes = my_shapes(grid)
    stages = grid.mesh[grid.stages] if grid.stages else None
    model, zero1, optimizer = build(grid, overlap, backwards)
    single, alone = train_alone(shapes, steps=0)
    norms = []
    for step in range(STEPS):
        for backward in range(backwards):
            model(given(grid, shapes, step, backward, backwards)).backward()
        norm = clip_grad_norm_(zero1.main_parameters, NO_CLIPPING, pp_mesh=stages)
        reference = exact_norm(step)
        assert abs(norm.item() / reference - 1) < 1e-6, (norm.item(), reference)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        step_alone(single, alone, step)
        with torch.no_grad():  # forward between steps reads fresh weights
            model(given(grid, shapes, step, 0, 1))
        check_codes_are_fresh(grid, model, single)
    check_part(grid, (model, optimizer), (single, alone))
    if save_to:
        dcp.save(checkpoint_of(model, optimizer), checkpoint_id=save_to)
    return norms


def check_part(grid: Grid, mine: tuple[Any, Any], single: tuple[Any, Any]) -> None:
    """This rank's part of a single process's weights, main parameters and moments."""
    expected = state_of(*single)
    for key, tensor in state_of(*mine).items():
        name = key.split(".")[1]
        assert torch.equal(tensor, cut(grid, name, expected[key])), key


def checkpoint_of(model: GivenGradients, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}


def load(model: GivenGradients, optimizer: Any, folder: str) -> None:
    state = checkpoint_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
    model.load_state_dict(state["model"])


def load_on(grid: Grid, folder: str) -> None:
    """Loads a single process's checkpoint."""
    model, _, optimizer = build(grid)
    load(model, optimizer, folder)
    check_part(grid, (model, optimizer), train_alone(my_shapes(grid)))


def check_codes_are_fresh(grid: Grid, model: GivenGradients, single: GivenGradients) -> None:
    for name, module in model.weights.items():
        compute = module._compute_weights["weight"]
        expected = single.weights[name]._compute_weights["weight"]
        if isinstance(compute, FP8Weight):
            codes = cut(grid, name, expected.codes.view(torch.uint8))
            assert torch.equal(compute.codes.view(torch.uint8), codes), name
        else:
            assert torch.equal(local_tensor(compute.detach()), cut(grid, name, expected)), name


def exact_norm(step: int) -> float:
    """Of all weights' gradients, in fp64."""
    gradients = exact_gradients(SHAPES, step, range(SAMPLES))
    return float(sum(g.double().square().sum() for g in gradients.values()) ** 0.5)


WAYS = [(True, 1), (False, 1), (True, 4)]
"""Overlap, and backward passes a step."""


def train_in_all_ways(name: str, folder: str) -> list[list[float]]:
    grid = GRIDS[name][1]()
    load_on(grid, f"{folder}/single")
    first, *others = WAYS
    norms = train_on(grid, *first, save_to=f"{folder}/{name}")
    return [norms, *(train_on(grid, *way) for way in others)]


@pytest.mark.parametrize("grid", GRIDS)
def test_bits_and_norm_of_a_single_process(grid, tmp_path):
    """And checkpoints: from a single process to the grid, and the reverse."""
    single = train_alone(SHAPES)
    dcp.save(checkpoint_of(*single), checkpoint_id=tmp_path / "single", no_dist=True)
    norms = run_ranks(train_in_all_ways, GRIDS[grid][0], grid, str(tmp_path))
    assert all(norms[0] == of_rank for of_rank in norms)
    assert norms[0][0] == norms[0][1] == norms[0][2]
    loaded = train_alone(SHAPES, steps=0)
    load(*loaded, tmp_path / grid)
    assert_same(state_of(*loaded), state_of(*single))


def train_with_shards_inside_blocks() -> list[str]:
    """192 rows a rank: blocks are those of the shard, its last ones padded."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = GivenGradients({"columnwise": (384, 200), "rowwise": (200, 512)})
    for name, dim in (("columnwise", 0), ("rowwise", 1)):
        module = model.weights[name]
        local = module.weight.detach().chunk(2, dim)[mesh["tp"].get_local_rank()].clone()
        placements = [Replicate(), Shard(dim)]
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
    zero1, optimizer = shard(model, mesh["dp"])
    gradients = {
        name: torch.randn(weight.weight._zero1_main.weights[0].shape)
        for name, weight in model.weights.items()
    }
    model(gradients).backward()
    optimizer.step()
    found = state_of(model, optimizer)
    for name in model.weights:
        codes, scale_inv = quantize_blockwise(found[f"weights.{name}.main"])
        assert torch.equal(found[f"weights.{name}.weight.codes"], codes.view(torch.uint8))
        assert torch.equal(found[f"weights.{name}.weight.scale_inv"], scale_inv)
    return zero1.weights_with_local_blocks()


def test_shards_that_cut_blocks_are_padded_and_named():
    assert run_ranks(train_with_shards_inside_blocks, 2) == [["weights.columnwise.weight"]] * 2


# Ranks that disagree, hang or die


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard_differently(difference: str) -> str:
    """Rank 1 of three differs; returns what each rank is told."""
    odd = dist.get_rank() == 1
    shapes = dict(SHAPES)
    if difference == "shape" and odd:
        shapes["whole"] = (130, 200)
    if difference == "weights" and odd:
        del shapes["embedding"]
    options: dict[str, Any] = {}
    if difference == "strategy":
        options["strategy"] = "param" if odd else "block"
    if difference == "scale_format":
        options["scale_format"] = "ue8m0" if odd else "fp32"
    with pytest.raises(RuntimeError) as error:
        shard(GivenGradients(shapes), world(), **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ("shape", "rank 0 has weights.whole.weight of 2 units.*; rank 1 has .* of 4 units"),
        ("weights", "rank 0 has weights.embedding.weight of .*; rank 1 has high-precision bucket"),
        ("strategy", "rank 0 has strategy = block; rank 1 has strategy = param"),
        ("scale_format", "rank 0 has scale_format = fp32; rank 1 has scale_format = ue8m0"),
    ],
)
def test_ranks_that_differ_are_named_before_anything_hangs(difference, told):
    for error in run_ranks(shard_differently, 3, difference):
        assert "ranks [1] have another model, config or layout than rank 0" in error
        assert re.search(told, error), error


def lose_a_rank(phase: str) -> None:
    """Rank 2 is killed between two steps, in backward, or before it publishes."""
    model = GivenGradients(SHAPES)
    _, optimizer = shard(model, world(), bucket_bytes=200_000, overlap=phase == "forward")
    dies = dist.get_rank() == 2
    for step in range(3):
        gradients = exact_gradients(SHAPES, step, range(dist.get_rank(), SAMPLES, 4))
        dies_now = dies and step == 1
        if dies_now and phase == "backward":
            first = next(iter(model.weights.values())).weight._zero1_main.weights[0].leaf
            first.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        model(gradients).backward()
        if dies_now and phase == "forward":
            optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("phase", ["backward", "forward"])
def test_ranks_end_with_an_error_when_one_is_killed(phase):
    started = time.monotonic()
    outcomes = rank_outcomes(lose_a_rank, 4, phase, timeout=30.0)
    assert time.monotonic() - started < 30.0
    errors = [outcome.error for outcome in outcomes]
    assert "exit code -9" in errors.pop(2)
    for error in errors:
        assert error is not None
        assert "did not end in time" not in error
    assert any(
        "of the bucket from weights." in error and "ranks [2] died" in error for error in errors
    ), errors
