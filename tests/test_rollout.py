"""Live weights for inference engines: the names, and the bits, of exported files."""

import logging
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from hf_files import FP8, differing, same_bits, tensors_of
from models import FP8_SHAPES, GivenGradients, exact_gradients, shard
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_fp8zero import quantize_blockwise
from titan_fp8zero.dcp_folder import DCPFolder
from titan_fp8zero.export import export_checkpoint
from titan_fp8zero.hf_names import SCALE_SUFFIX, pieces_of
from titan_fp8zero.model_spec import Entry, ModelSpec
from titan_fp8zero.rollout import iter_fp8_weights


def portable(items: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, with e4m3 as bytes: torch pickles it, but cannot read it again."""
    return {
        name: (tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor).clone()
        for name, tensor in items.items()
    }


EXPERTS = {"experts": (4, 200, 300), "router": (4, 130), "norm": (97,)}


def split_experts(state: dict[str, Any]) -> dict[str, Any]:
    named = {}
    for fqn, tensor in state.items():
        if "experts" in fqn:
            named |= {f"expert.{index}.weight": part for index, part in enumerate(tensor)}
        else:
            named[fqn] = tensor
    return named


def expert_parallel_items(folder: str) -> list[dict[str, torch.Tensor]]:
    """Of all experts, and of this rank's, with the checkpoint for the export."""
    model = GivenGradients(EXPERTS)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))
    experts = model.weights["experts"]
    sharded = distribute_tensor(experts.weight.detach(), mesh, [Replicate(), Shard(0)])
    experts.weight = nn.Parameter(sharded)
    dense = init_device_mesh("cpu", (2,))
    shard(model, dense, expert_mesh=mesh["efsdp"])
    dcp.save(model.state_dict(), checkpoint_id=folder)
    every = dict(iter_fp8_weights(model, split_experts))
    mine = dict(iter_fp8_weights(model, split_experts, gather_experts=False))
    codes = model.weights["experts"]._compute_weights["weight"].codes
    first = mine[f"expert.{2 * dist.get_rank()}.weight"]
    assert first.data_ptr() == codes.data_ptr(), "no copy"
    return [portable(every), portable(mine)]


@pytest.mark.multirank
def test_expert_parallel_ranks_give_what_an_export_holds(tmp_path):
    results = run_ranks(expert_parallel_items, 2, str(tmp_path / "ckpt"))
    entries = {
        f"weights.{name}.weight": Entry(shape, torch.float32 if name == "norm" else FP8)
        for name, shape in EXPERTS.items()
    }
    spec = ModelSpec(entries, {}, split_experts)
    list(export_checkpoint(DCPFolder(tmp_path / "ckpt"), tmp_path / "hf", spec))
    exported = tensors_of(tmp_path / "hf")
    assert len(exported) == 2 * 4 + 2 + 1
    for rank, (every, mine) in enumerate(results):
        assert not differing(every, portable(exported))
        other = [f"expert.{index}." for index in range(4) if index // 2 != rank]
        kept = {n: t for n, t in exported.items() if not n.startswith(tuple(other))}
        assert not differing(mine, portable(kept))


TENSOR_PARALLEL = {
    "whole_rows": ((512, 200), Shard(0)),
    "whole_columns": ((200, 256), Shard(1)),
    "cut_rows": ((320, 200), Shard(0)),
    "norm": ((96,), Replicate()),
}


def tensor_parallel_items(folder: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = GivenGradients({name: shape for name, (shape, _) in TENSOR_PARALLEL.items()})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    for name, (_, placement) in TENSOR_PARALLEL.items():
        weight = model.weights[name].weight.detach()
        sharded = distribute_tensor(weight, mesh, [Replicate(), placement])
        model.weights[name].weight = nn.Parameter(sharded)
    shard(model, mesh["fsdp"])
    dcp.save(model.state_dict(), checkpoint_id=folder)
    handler = BufferingHandler(100)
    logging.getLogger("titan_fp8zero").addHandler(handler)
    items = dict(iter_fp8_weights(model))
    messages = [record.getMessage() for record in handler.buffer]
    return portable(items), messages


@pytest.mark.multirank
def test_tensor_parallel_ranks_give_whole_weights(tmp_path):
    results = run_ranks(tensor_parallel_items, 2, str(tmp_path / "ckpt"))
    entries = {
        f"weights.{name}.weight": Entry(shape, torch.float32 if name == "norm" else FP8)
        for name, (shape, _) in TENSOR_PARALLEL.items()
    }
    spec = ModelSpec(entries, {}, dict)
    list(export_checkpoint(DCPFolder(tmp_path / "ckpt"), tmp_path / "hf", spec))
    exported = tensors_of(tmp_path / "hf")
    for items, messages in results:
        assert not differing(items, portable(exported))
        assert len(messages) == 1 and "weights.cut_rows.weight is quantized anew" in messages[0]


STAGES = [{"plain": (256, 384), "norm": (97,)}, {"odd": (200, 300), "scalar": ()}]


def pipeline_items() -> list[dict[str, torch.Tensor]]:
    """Of this rank's stage, and of all."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = GivenGradients(STAGES[dist.get_rank()])
    shard(model, None)
    return [
        portable(dict(iter_fp8_weights(model))),
        portable(dict(iter_fp8_weights(model, pp_mesh=mesh))),
    ]


@pytest.mark.multirank
def test_pipeline_ranks_give_the_weights_of_all_stages():
    (first, all_of_first), (second, all_of_second) = run_ranks(pipeline_items, 2)
    assert len(first) == len(second) == 3
    assert not differing(all_of_first, first | second)
    assert not differing(all_of_second, first | second)


def test_rollout_waits_for_what_a_step_publishes():
    model = GivenGradients(FP8_SHAPES)
    _, optimizer = shard(model, None, overlap=True)
    model(exact_gradients(FP8_SHAPES, 0, range(12))).backward()
    before = {name: tensor.clone() for name, tensor in iter_fp8_weights(model)}
    optimizer.step()
    after = dict(iter_fp8_weights(model))
    assert len(after) == 2 * len(FP8_SHAPES)
    for name in FP8_SHAPES:
        weight = f"weights.{name}.weight"
        codes, scale_inv = quantize_blockwise(model.state_dict()[weight].gather_local())
        assert same_bits(after[weight], codes) and same_bits(
            after[weight + SCALE_SUFFIX], scale_inv
        )
    assert differing(before, after)


def test_a_stack_without_names_for_experts_is_not_given_in_parts():
    model = GivenGradients({"experts": (3, 130, 70)})
    shard(model, None)
    assert dict(iter_fp8_weights(model))["weights.experts.weight"].shape == (3, 130, 70)
    with pytest.raises(ValueError, match=r"weights.experts.weight: gather_experts=False needs a"):
        dict(iter_fp8_weights(model, gather_experts=False))


@pytest.mark.parametrize(
    "to_hf, told",
    [
        (lambda state: {name: tensor.T for name, tensor in state.items()}, "it is reshaped"),
        (lambda state: {name: tensor[[0, 0, 1]] for name, tensor in state.items()}, "mixes rows"),
    ],
)
def test_names_that_do_more_than_order_rows_are_refused(to_hf, told):
    with pytest.raises(ValueError, match=told):
        pieces_of("weight", (3, 5), to_hf)
