"""Checkpoints in the weights' own coordinates: between ranks, meshes, strategies, and FSDP2."""

import copy
import io
import itertools
import json
import os
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    SHAPES,
    GivenGradients,
    compute_weights,
    differing,
    everything,
    exact_gradients,
    local_state,
    main_values,
    my_samples,
    shard,
)
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_fp8zero import BlockwiseFP8Linear
from titan_fp8zero.checkpoint import (
    WeightView,
    boxes_of_run,
    load_optimizer_state_dict,
    optimizer_state_dict,
)
from titan_fp8zero.checkpoint_files import unfinished, verify_checkpoint
from titan_fp8zero.sidecar import read_sidecar

ROOT = Path(__file__).parents[1]


# A run of units as boxes.


@st.composite
def runs(draw):
    grid = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    end = draw(st.integers(0, prod(grid)))
    return draw(st.integers(0, end)), end, grid


@settings(max_examples=400)
@given(runs())
def test_boxes_cover_a_run_in_order_and_are_few(run):
    start, end, grid = run
    boxes = list(boxes_of_run(start, end, grid))
    cells = [
        cell
        for box in boxes
        for cell in itertools.product(
            *(range(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
        )
    ]
    row_major = list(itertools.product(*map(range, grid)))
    assert cells == row_major[start:end], "each cell of the run once, in its order"
    assert len(boxes) <= max(1, 2 * len(grid) - 1)


@pytest.mark.parametrize("grid, most", [((7,), 1), ((5, 4), 3), ((4, 3, 4), 5)])
def test_the_bound_on_boxes_is_reached(grid, most):
    ends = itertools.combinations(range(prod(grid) + 1), 2)
    assert max(len(list(boxes_of_run(start, end, grid))) for start, end in ends) == most


# From ranks to other ranks, meshes and strategies.

SAVED_STEPS, ALL_STEPS = 2, 4
ONE_MAIN_PARAMETER = {"padding_limit": 0.0}
SHARDINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "4": (4, {}),
    "3 pooled": (3, ONE_MAIN_PARAMETER),
    "2 param": (2, {"strategy": "param"}),
    "3 small buckets": (3, {"bucket_bytes": 1 << 18}),
    "2x2": (4, {}),
    "8": (8, {"bucket_bytes": 1 << 18}),
}


def mesh_of(sharding: str) -> DeviceMesh | None:
    if sharding == "2x2":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    num_ranks, _ = SHARDINGS[sharding]
    return None if num_ranks == 1 else init_device_mesh("cpu", (num_ranks,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(exact_gradients(model.shapes, step, my_samples())).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
    model.load_state_dict(state["model"])


def run_and_save(sharding: str, folder: str, is_async: bool, optimizer_name: str) -> tuple:
    """Everything at the save, and at the end of the run."""
    model = GivenGradients()
    _, optimizer = shard(model, mesh_of(sharding), optimizer_name, **SHARDINGS[sharding][1])
    train(model, optimizer, range(SAVED_STEPS))
    saved = copy.deepcopy(everything(model, optimizer))
    state = state_of(model, optimizer)
    if is_async:
        # A group of its own: the upload's collectives run beside those of training.
        group = dist.new_group(backend="gloo")
        upload = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    else:
        dcp.save(state, checkpoint_id=folder)
    train(model, optimizer, range(SAVED_STEPS, ALL_STEPS))
    if is_async:
        upload.result()
    return saved, everything(model, optimizer)


def load_and_run(sharding: str, folder: str, optimizer_name: str) -> tuple:
    """Everything as loaded into other weights, and at the end of the run."""
    model = GivenGradients()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    _, optimizer = shard(model, mesh_of(sharding), optimizer_name, **SHARDINGS[sharding][1])
    load(model, optimizer, folder)
    loaded = copy.deepcopy(everything(model, optimizer))
    train(model, optimizer, range(SAVED_STEPS, ALL_STEPS))
    return loaded, everything(model, optimizer)


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """A checkpoint folder, with everything at the save and at the end of the run; made once."""

    @cache
    def save(sharding: str, is_async: bool, optimizer: str) -> tuple[str, dict, dict]:
        folder = str(tmp_path_factory.mktemp("saved"))
        num_ranks, _ = SHARDINGS[sharding]
        saved, end = run_ranks(run_and_save, num_ranks, sharding, folder, is_async, optimizer)[0]
        return folder, saved, end

    return save


@pytest.mark.multirank
@pytest.mark.parametrize(
    "saving, loading, is_async, optimizer",
    [
        ("2", "1", False, "blockwise_foreach"),
        ("2", "2", False, "blockwise_foreach"),
        ("2", "3", False, "blockwise_foreach"),
        ("2", "2 param", False, "blockwise_foreach"),
        ("2", "3 pooled", False, "blockwise_foreach"),
        ("2", "4", False, "blockwise_foreach"),
        ("2", "2x2", False, "blockwise_foreach"),
        ("2", "3 small buckets", True, "foreach"),
        ("2x2", "3", False, "sgd"),
        ("4", "2", False, "foreach"),
        ("2 param", "3", False, "blockwise_foreach"),
        ("8", "3 small buckets", False, "blockwise_foreach"),  # most own only padding of some
        ("3 pooled", "1", False, "foreach"),
        # The fused kernel of CPUs rounds the last elements of a shard in its own way.
        ("2", "2", False, "fused"),
        ("2 param", "2 param", False, "blockwise_fused"),
    ],
)
def test_resume_is_exact_on_any_sharding(saved_by, saving, loading, is_async, optimizer):
    folder, saved, end = saved_by(saving, is_async, optimizer)
    num_ranks, _ = SHARDINGS[loading]
    loaded, resumed = run_ranks(load_and_run, num_ranks, loading, folder, optimizer)[0]
    assert not differing(saved, loaded)
    assert not differing(end, resumed)


def spread_magnitudes(model: nn.Module) -> None:
    """Log-uniform over most of fp32, by rows of blocks: subnormal ones and huge ones."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            blocks = torch.empty(*parameter.shape[:-1], 1).uniform_(-42, 36, generator=generator)
            if parameter.dim() > 1:  # all rows of a block as its first one
                rows = torch.arange(parameter.shape[-2])
                blocks = blocks.index_select(-2, rows - rows % 128)
            parameter.mul_((10.0**blocks).view(blocks.shape if parameter.dim() else ()))


def magnitudes_on_ranks(folder: str, is_saving: bool) -> tuple:
    """Everything as saved or loaded, and two steps later."""
    model = GivenGradients()
    if is_saving:
        spread_magnitudes(model)
    _, optimizer = shard(model, mesh_of("2" if is_saving else "3"), "blockwise_foreach")
    if is_saving:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    else:
        load(model, optimizer, folder)
    at_start = copy.deepcopy(everything(model))
    train(model, optimizer, range(2))
    return at_start, everything(model, optimizer)


@pytest.mark.multirank
def test_resume_is_exact_for_blocks_of_all_magnitudes(tmp_path):
    saved, end = run_ranks(magnitudes_on_ranks, 2, str(tmp_path), True)[0]
    loaded, resumed = run_ranks(magnitudes_on_ranks, 3, str(tmp_path), False)[0]
    scales = [tensor for name, tensor in saved.items() if name.endswith("scale_inv")]
    assert min(tensor.min() for tensor in scales) < 1e-30
    assert max(tensor.max() for tensor in scales) > 1e20
    assert not differing(saved, loaded)
    assert not differing(end, resumed)


@pytest.mark.multirank
def test_each_box_is_stored_once_under_hsdp_and_there_are_few(saved_by):
    folder, _, _ = saved_by("2x2", False, "sgd")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for name, shape in SHAPES.items():
        stored = metadata.state_dict_metadata[f"model.weights.{name}.weight"]
        assert stored.size == torch.Size(shape)
        assert sum(prod(chunk.sizes) for chunk in stored.chunks) == prod(shape)
        assert len(stored.chunks) <= 2 * max(1, 2 * len(shape) - 1)
    writers = {Path(info.relative_path).name for info in metadata.storage_data.values()}
    assert len(writers) == 4, "replicas share the writing"


# Expert parallelism.

EXPERTS = {"experts": (4, 200, 300), "router": (4, 130), "norm": (97,)}


def expert_model(ep: int) -> tuple[nn.Module, dict[str, Any]]:
    """Experts in dim 0 over "ep", as TorchTitan places them; one rank of `ep` 1 has them all."""
    model = GivenGradients(EXPERTS)
    if dist.get_world_size() == 1:
        return model, {"mesh": None}
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("efsdp", "ep")
    )
    experts = model.weights["experts"]
    sharded = distribute_tensor(experts.weight.detach(), mesh, [Replicate(), Shard(0)])
    experts.weight = nn.Parameter(sharded)
    dense = init_device_mesh("cpu", (dist.get_world_size(),))
    return model, {"mesh": dense, "expert_mesh": mesh["efsdp"]}


def expert_gradients(model: nn.Module, ep: int) -> dict[str, torch.Tensor]:
    """Of this rank's experts, and of its samples of what all ranks hold."""
    whole = exact_gradients(EXPERTS, 0, range(12))
    gradients = exact_gradients(EXPERTS, 0, my_samples())
    rank = dist.get_rank()
    mine = whole["experts"].chunk(ep)[rank % ep]
    gradients["experts"] = mine if rank // ep == 0 else torch.zeros_like(mine)
    return gradients


def save_experts(folder: str, ep: int) -> None:
    model, meshes = expert_model(ep)
    _, optimizer = shard(model, **meshes)
    model(expert_gradients(model, ep)).backward()
    optimizer.step()
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def pass_on_experts(folder: str, to_folder: str, ep: int) -> None:
    model, meshes = expert_model(ep)
    _, optimizer = shard(model, **meshes)
    load(model, optimizer, folder)
    dcp.save(state_of(model, optimizer), checkpoint_id=to_folder)


def load_experts(folder: str) -> dict[str, torch.Tensor]:
    model, meshes = expert_model(1)
    _, optimizer = shard(model, **meshes)
    load(model, optimizer, folder)
    return everything(model, optimizer)


def trained_experts() -> dict[str, torch.Tensor]:
    model, meshes = expert_model(1)
    _, optimizer = shard(model, **meshes)
    model(expert_gradients(model, 1)).backward()
    optimizer.step()
    return everything(model, optimizer)


@pytest.mark.multirank
def test_expert_parallel_ranks_save_their_experts_of_the_whole(tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    run_ranks(save_experts, 4, folders[0], 2)
    run_ranks(pass_on_experts, 2, *folders, 2)
    expected = run_ranks(trained_experts, 1)[0]
    for folder in folders:
        assert not differing(expected, run_ranks(load_experts, 1, folder)[0])
    stored = dcp.FileSystemReader(folders[0]).read_metadata().state_dict_metadata
    assert stored["model.weights.experts.weight"].size == torch.Size(EXPERTS["experts"])


# FSDP2.

FSDP2_SHAPES = {name: shape for name, shape in SHAPES.items() if name != "scalar"}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def fsdp2_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GivenGradients(FSDP2_SHAPES)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)


def fsdp2_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"model": model.state_dict(), "optimizer": optimizer_state}


def fsdp2_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[f"{name}.main"] = parameter.detach().full_tensor()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.full_tensor() if value.ndim else value
    return found


def pass_through_fsdp2(folder: str, to_folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = fsdp2_model()
    state = fsdp2_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"], options=FLAT)
    model.load_state_dict(state["model"])
    dcp.save(fsdp2_state(model, optimizer), checkpoint_id=to_folder)
    return fsdp2_values(model, optimizer)


def save_for_fsdp2(folder: str) -> dict[str, torch.Tensor]:
    model = GivenGradients(FSDP2_SHAPES)
    _, optimizer = shard(model, mesh_of("2"), "blockwise_foreach")
    train(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return everything(model, optimizer)


def load_from_fsdp2(folder: str) -> dict[str, torch.Tensor]:
    model = GivenGradients(FSDP2_SHAPES)
    _, optimizer = shard(model, mesh_of("2"), "blockwise_foreach")
    load(model, optimizer, folder)
    return everything(model, optimizer)


@pytest.mark.multirank
def test_fsdp2_loads_ours_and_we_load_what_it_saves(tmp_path):
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    saved = run_ranks(save_for_fsdp2, 2, ours)[0]
    passed = run_ranks(pass_through_fsdp2, 3, ours, theirs)[0]
    values = {name for name in saved if not name.endswith((".codes", ".scale_inv", ".values"))}
    assert not differing({name: saved[name] for name in values}, passed)
    assert not differing(saved, run_ranks(load_from_fsdp2, 2, theirs)[0])


# State dicts of one process.


class Tied(nn.Module):
    """Tied, wrapped, compiled and frozen weights."""

    shapes = ()

    def __init__(self) -> None:
        super().__init__()
        self.first = checkpoint_wrapper(BlockwiseFP8Linear(200, 130))
        self.second = torch.compile(BlockwiseFP8Linear(200, 130, bias=False))
        self.second._orig_mod.weight = self.first._checkpoint_wrapped_module.weight
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.register_buffer("count", torch.tensor(7))


@pytest.mark.parametrize("options", [{}, {"strategy": "param"}])
def test_state_dict_has_every_reader_in_its_own_shape(options):
    model = Tied()
    stock = copy.deepcopy(model).state_dict()
    shard(model, None, **options)
    state = model.state_dict()
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in stock.items()
    }
    views = {key for key, value in state.items() if isinstance(value, WeightView)}
    assert views == state.keys() - {"count"}


def test_state_dict_is_loaded_from_copies_and_pickles():
    model = GivenGradients()
    _, optimizer = shard(model, None)
    train(model, optimizer, range(1))
    expected = copy.deepcopy(everything(model, optimizer))
    buffer = io.BytesIO()
    torch.save(state_of(model, optimizer), buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(state_of(model, optimizer)), torch.load(buffer, weights_only=False)]
    for state in copies:
        train(model, optimizer, range(1, 2))
        assert differing(expected, everything(model, optimizer))
        load_optimizer_state_dict(model, optimizer, state["optimizer"])
        model.load_state_dict(state["model"])
        assert not differing(expected, everything(model, optimizer))


def test_state_dict_is_staged_by_a_thread_and_loaded_in_place():
    """What `async_mode = "async_with_pinned_mem"` does, but for the pinned memory of GPUs."""
    model = GivenGradients()
    _, optimizer = shard(model, None)
    train(model, optimizer, range(1))
    expected = copy.deepcopy(everything(model, optimizer))
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    staged = stager.stage(state_of(model, optimizer)).result()
    train(model, optimizer, range(1, 2))
    load_optimizer_state_dict(model, optimizer, staged["optimizer"])
    model.load_state_dict(staged["model"])
    stager.close()
    assert not differing(expected, everything(model, optimizer))


def test_codes_come_from_the_loaded_main_parameters():
    model = GivenGradients()
    shard(model, None)
    state = copy.deepcopy(model.state_dict())
    expected = compute_weights(model)
    for name in expected:
        if name.endswith(".codes"):
            module = model.get_submodule(name.removesuffix(".weight.codes"))
            module._compute_weights["weight"].codes.view(torch.uint8).add_(1)
    assert differing(expected, compute_weights(model))
    model.load_state_dict(state)
    assert not differing(expected, compute_weights(model))


def test_cast_views_are_saved_in_their_dtype(tmp_path):
    model = GivenGradients()
    shard(model, None)
    cast = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    dcp.save(cast, checkpoint_id=str(tmp_path), no_dist=True)
    loaded = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in cast.items()}
    dcp.load(loaded, checkpoint_id=str(tmp_path), no_dist=True)
    for name, value in main_values(model).items():
        assert torch.equal(loaded[name.removesuffix(".main")], value.bfloat16()), name


def test_reading_optimizer_state_before_the_first_step_changes_no_weight():
    model = GivenGradients()
    _, optimizer = shard(model, None, "blockwise_foreach")
    before = local_state(model, optimizer)
    optimizer_state_dict(model, optimizer)
    optimizer.state.clear()
    after = local_state(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_other_operations_on_a_view_are_refused():
    model = GivenGradients()
    shard(model, None)
    view = model.state_dict()["weights.odd.weight"]
    with pytest.raises(NotImplementedError, match=r"aten.add.* WeightView\(shape=\(200, 300\)"):
        view + 1


def test_weights_that_share_a_main_parameter_need_one_step_count():
    shapes = {"a": (128, 128), "b": (130, 70)}
    separate, pooled = GivenGradients(shapes), GivenGradients(shapes)
    _, optimizer = shard(separate, None, padding_limit=float("inf"))
    for step, names in enumerate((["a", "b"], ["a"])):
        gradients = exact_gradients(shapes, step, range(12))
        separate({name: gradients[name] for name in names}).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer_state_dict(separate, optimizer)
    _, pooled_optimizer = shard(pooled, None, strategy="param")
    with pytest.raises(ValueError, match=r"weights.b.weight and .* share .* step .* 1.0 and 2.0"):
        load_optimizer_state_dict(pooled, pooled_optimizer, state)


def test_state_of_other_ranks_or_strategies_is_refused_without_dcp():
    one, other = GivenGradients({"a": (300, 128)}), GivenGradients({"a": (500, 128)})
    shard(one, None)
    shard(other, None)
    with pytest.raises(ValueError, match=r"owns units \[\(0, 3\)\] .* the state has \[\(0, 4\)\]"):
        one.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda shapes: {**shapes, "odd": (200, 301)}, "Size mismatch.*model.weights.odd.weight"),
        (lambda shapes: {**shapes, "new": (3, 4)}, "Missing key.*model.weights.new.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error_that_names_the_weight(tmp_path, change, told):
    shapes = {"odd": (200, 300)}
    model, other = GivenGradients(shapes), GivenGradients(change(shapes))
    shard(model, None)
    shard(other, None)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=told):
        dcp.load({"model": other.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)


# TorchTitan's trainer.

SMALL = [
    *("--training.seq_len", "64", "--training.local_batch_size", "2", "--training.steps", "4"),
    *("--lr_scheduler.warmup_steps", "2", "--validation.no-enable"),
    *("--metrics.no-enable-tensorboard", "--checkpoint.no-last-save-model-only"),
]
LLAMA, LLAMA_STOCK = "llama3_debug", "llama3_baseline"
MOE, MOE_STOCK = "deepseek_v3_debug", "deepseek_v3_baseline"
EXPERT_PARALLEL_1 = ("--parallelism.expert_parallel_degree", "1")
IN_HF = ("--checkpoint.last-save-in-hf", "--checkpoint.last-save-model-only")
IN_HF_BF16 = (*IN_HF, "--checkpoint.export_dtype", "bfloat16")
WITHOUT_OPTIMIZER = ("--checkpoint.exclude_from_loading", "optimizer")
BY_WEIGHT = ("--blockwise_fp8.strategy", "param", "--optimizer.name", "AdamW")


def launch(module: list[str], num_ranks: int, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(num_ranks), *module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def config(name: str) -> list[str]:
    return ["--job.config_file", str(ROOT / "train_configs" / f"{name}.toml"), *SMALL]


def resume(name: str, path: Path, *extra: str) -> list[str]:
    return [
        *(*config(name), "--checkpoint.initial_load_path", str(path)),
        *("--checkpoint.no-initial-load-model-only", *extra),
    ]


def from_hf(name: str, path: Path) -> list[str]:
    initial = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(path)]
    return [*config(name), *initial]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A seed checkpoint (step 0 of "seeded"), and all runs of two ranks, with their results."""
    folder = tmp_path_factory.mktemp("trainer")
    seed = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--debug.seed", "7"]
    seed += ["--job.dump_folder", str(folder / "seeded"), "--checkpoint.last-save-model-only"]
    launch(["-m", "titan_fp8zero.launch", *config(LLAMA), *seed], 1, folder)
    saving = ("--checkpoint.interval", "2", "--checkpoint.async_mode", "async")
    steps = {
        name: folder / name / "checkpoint" for name in ("straight", "stock", "moe", "hf", "moe_hf")
    }
    runs = [
        {"name": "straight", "args": [*config(LLAMA), *saving]},
        {"name": "resumed", "args": resume(LLAMA, steps["straight"] / "step-2")},
        {"name": "stock", "args": resume(LLAMA_STOCK, steps["straight"] / "step-2"), "save_as": 2},
        {
            "name": "back",
            "args": resume(LLAMA, steps["stock"] / "step-2", *BY_WEIGHT),
            "save_as": 2,
        },
        {"name": "seeded", "args": config(LLAMA), "save_as": 1},
        {"name": "moe", "args": [*config(MOE), "--training.steps", "2"]},
        {
            "name": "moe_ep1",
            "args": resume(MOE, steps["moe"] / "step-2", *EXPERT_PARALLEL_1),
            "save_as": 2,
        },
        {"name": "moe_stock", "args": resume(MOE_STOCK, steps["moe"] / "step-2"), "save_as": 2},
        *(
            {"name": name, "args": args, "save_as": 2}
            for name, args in {
                "excluded": resume(LLAMA, steps["straight"] / "step-2", *WITHOUT_OPTIMIZER),
                "hf": resume(LLAMA, steps["straight"] / "step-2", *IN_HF),
                "hf_stock": resume(LLAMA_STOCK, steps["straight"] / "step-2", *IN_HF),
                "hf_loaded": from_hf(LLAMA, steps["hf"] / "step-2"),
                "moe_hf": resume(MOE, steps["moe"] / "step-2", *IN_HF_BF16),
                "moe_hf_stock": resume(MOE_STOCK, steps["moe"] / "step-2", *IN_HF_BF16),
                "moe_hf_loaded": from_hf(MOE, steps["moe_hf"] / "step-2"),
            }.items()
        ),
    ]
    (folder / "runs.json").write_text(json.dumps(runs))
    files = [str(folder / "runs.json"), str(folder / "results.json")]
    launch([str(ROOT / "tests" / "checkpoint_runs.py"), *files], 2, folder)
    return folder


def stored(trained: Path, name: str, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint, and the names of all else."""
    folder = trained / name / "checkpoint" / f"step-{step}"
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {key: tensors.get(key, torch.empty(0)) for key in metadata}


@pytest.mark.multirank
def test_trainer_resumes_from_an_asynchronous_save_to_the_bit(trained):
    runs = json.loads((trained / "results.json").read_text())
    assert runs["resumed"]["losses"] == runs["straight"]["losses"][2:]
    assert runs["resumed"]["step"] == 4
    assert runs["resumed"]["compute_weights"] == runs["straight"]["compute_weights"]
    assert not differing(stored(trained, "resumed", 4), stored(trained, "straight", 4))


@pytest.mark.multirank
def test_trainer_writes_checksums_whatever_the_kind_of_save(trained):
    saves = {"straight": 2, "moe": 2, "seeded": 0, "resumed": 4}  # asynchronous and not
    for name, step in saves.items():
        checkpoint = trained / name / "checkpoint" / f"step-{step}"
        assert verify_checkpoint(checkpoint).notes == {"skipped_steps": 0}
        assert not unfinished(checkpoint).parent.exists()
    assert read_sidecar(trained / "stock" / "checkpoint" / "step-2") is None


@pytest.mark.multirank
def test_trainer_round_trip_through_stock_keeps_names_and_bits(trained):
    saved = stored(trained, "straight", 2)
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in saved
    assert saved["layers.0.attention.wq.weight"].shape == (256, 256)
    assert not differing(saved, stored(trained, "stock", 2))
    assert not differing(saved, stored(trained, "back", 2))


@pytest.mark.multirank
def test_trainer_round_trip_of_experts_through_stock_and_one_expert_rank(trained):
    saved = stored(trained, "moe", 2)
    assert saved["layers.1.moe.experts.w1"].shape == (8, 256, 256)
    assert not differing(saved, stored(trained, "moe_stock", 2))
    assert not differing(saved, stored(trained, "moe_ep1", 2))


@pytest.mark.multirank
def test_trainer_starts_from_a_seed_checkpoint(trained):
    seed, seeded = stored(trained, "seeded", 0), stored(trained, "seeded", 1)
    assert not differing(seed, {key: seeded[key] for key in seed})
    other_seed = stored(trained, "stock", 2)
    assert differing(seed, {key: other_seed[key] for key in seed})


@pytest.mark.multirank
def test_trainer_excludes_states_from_loading(trained):
    saved, excluded = stored(trained, "straight", 2), stored(trained, "excluded", 2)
    changed = [name for name in saved if not torch.equal(saved[name], excluded[name])]
    assert "optimizer.state.layers.0.attention.wq.weight.exp_avg" in changed
    assert all(name.startswith("optimizer.state.") for name in changed)


def hf_files(trained: Path, name: str) -> dict[str, torch.Tensor]:
    (file,) = (trained / name / "checkpoint" / "step-2").glob("*.safetensors")
    return load_file(file)


@pytest.mark.multirank
@pytest.mark.parametrize("name, dtype", [("hf", torch.float32), ("moe_hf", torch.bfloat16)])
def test_trainer_saves_in_hugging_face_format_what_stock_saves(trained, name, dtype):
    ours, stock = hf_files(trained, name), hf_files(trained, f"{name}_stock")
    assert not differing(ours, stock)
    assert {tensor.dtype for tensor in ours.values()} == {dtype}


@pytest.mark.multirank
@pytest.mark.parametrize("name, source", [("hf", "straight"), ("moe_hf", "moe")])
def test_trainer_loads_hugging_face_format_into_main_parameters(trained, name, source):
    (dtype,) = {tensor.dtype for tensor in hf_files(trained, name).values()}
    saved, loaded = stored(trained, source, 2), stored(trained, f"{name}_loaded", 2)
    model = {fqn for fqn in saved if fqn.startswith(("layers.", "tok_", "norm", "output"))}
    assert len(model) > 50
    assert not differing(
        {fqn: saved[fqn].to(dtype).float() for fqn in model}, {fqn: loaded[fqn] for fqn in model}
    )


@pytest.mark.multirank
def test_trainer_publishes_what_it_loads_from_hugging_face_format(trained):
    runs = json.loads((trained / "results.json").read_text())
    assert runs["hf_loaded"]["compute_weights"] == runs["back"]["compute_weights"]
