"""Live compute weights under the names that inference engines load, without files."""

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_fp8zero.blocks import quantize_main
from titan_fp8zero.checkpoint import weight_view
from titan_fp8zero.compute_weight import FP8Weight
from titan_fp8zero.hf_names import SCALE_SUFFIX, ToHF, pieces_of
from titan_fp8zero.main_parameter import Weight, clean_fqn, local_tensor, main_of

logger = logging.getLogger("titan_fp8zero")


Item = tuple[str, torch.Tensor]


def iter_fp8_weights(
    model: nn.Module,
    to_hf: ToHF | None = None,
    *,
    gather_experts: bool = True,
    pp_mesh: DeviceMesh | None = None,
) -> Iterator[Item]:
    """The weights that forward reads, as `(name, tensor)`: what vLLM's `load_weights` and SGLang's
    `update_weights_from_tensor` take of a model in DeepSeek-V3's FP8 layout.

    An FP8 weight is two items, e4m3 `[R, C]` under `name` and fp32
    `[ceil(R/128), ceil(C/128)]` under `name + "_scale_inv"`; others are one, in the compute dtype;
    then persistent buffers. Nothing is quantized or copied, so take what is to outlive the next
    optimizer step, but for three cases: shards of tensor or expert parallelism are gathered; rows
    that the format orders otherwise are put in its order; and a weight whose blocks that order or
    its sharding cuts is quantized anew from its main parameter, and named in the log. Tied
    weights come once. A collective: iterate to the end on all ranks.

    Args:
        model: sharded by `shard_zero1`; with pipeline parallelism, this rank's part.
        to_hf: as TorchTitan's `StateDictAdapter.to_hf`; None keeps the model's own names.
        gather_experts: False gives each expert-parallel rank its own experts only.
        pp_mesh: one-dimensional, of pipeline stages: every rank is then given the weights of all
            stages, those of other stages as copies. None gives this rank's stage.
    """
    items = _items_of_part(model, to_hf or (lambda state_dict: state_dict), gather_experts)
    return items if pp_mesh is None else _items_of_stages(items, pp_mesh)


def _items_of_part(model: nn.Module, to_hf: ToHF, gather_experts: bool) -> Iterator[Item]:
    mains = [main for main in map(main_of, model.parameters()) if main is not None]
    for owner in dict.fromkeys(main.owner for main in mains):
        owner.wait_for_publish()
    for weight in (weight for main in mains for weight in main.weights):
        yield from _items(weight, to_hf, gather_experts)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield from to_hf({clean_fqn(name): buffer}).items()


def _items_of_stages(items: Iterator[Item], pp_mesh: DeviceMesh) -> Iterator[Item]:
    """Each stage in turn sends its items, one at a time."""
    group, device = pp_mesh.get_group(), torch.device(pp_mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    for sender in dist.get_process_group_ranks(group):
        is_mine = sender == dist.get_rank()
        while True:
            item = next(items, None) if is_mine else None
            header = [item and (item[0], item[1].shape, item[1].dtype)]
            dist.broadcast_object_list(header, src=sender, group=group, device=device)
            if header[0] is None:
                break
            name, shape, dtype = header[0]
            tensor = item[1] if item else torch.empty(shape, dtype=dtype, device=device)
            wire = tensor.contiguous().view(-1).view(torch.uint8)  # gloo rejects float8
            dist.broadcast(wire, src=sender, group=group)
            yield name, tensor


def _items(weight: Weight, to_hf: ToHF, gather_experts: bool) -> Iterator[Item]:
    shape, offset = weight.mesh.whole_of(weight.shape)
    pieces = pieces_of(weight.fqn, shape, to_hf)

    def gathered(local: torch.Tensor) -> torch.Tensor:
        return _gather(weight, local, gather_experts)

    first = 0
    if len(shape) == 3 and not gather_experts:
        first, last = offset[0], offset[0] + weight.shape[0]
        if any(piece.expert is None for piece in pieces):
            raise ValueError(f"{weight.fqn}: gather_experts=False needs a name for each expert")
        pieces = [piece for piece in pieces if first <= (piece.expert or 0) < last]
    if not isinstance(weight.compute, FP8Weight):
        values = gathered(local_tensor(weight.compute.detach()))
        yield from ((piece.name, piece.take(values, first)) for piece in pieces)
    elif not weight.mesh.cuts_blocks(weight.shape) and all(piece.keeps_blocks for piece in pieces):
        codes = gathered(weight.compute.codes.view(torch.uint8)).view(torch.float8_e4m3fn)
        scale_inv = gathered(weight.compute.scale_inv)
        for piece in pieces:
            yield piece.name, piece.take(codes, first)
            yield piece.name + SCALE_SUFFIX, piece.take_scale(scale_inv, first)
    else:
        logger.warning("%s is quantized anew: its order or sharding cuts blocks", weight.fqn)
        precision = weight.main.bucket.precision
        values = gathered(weight_view(weight, weight.parameter).gather_local())
        for piece in pieces:
            codes, scale_inv = quantize_main(
                piece.take(values, first), precision.scale_format, precision.round_main_to_bf16
            )
            yield piece.name, codes
            yield piece.name + SCALE_SUFFIX, scale_inv


def _gather(weight: Weight, local: torch.Tensor, gather_experts: bool) -> torch.Tensor:
    tensor = weight.mesh.compute_tensor(local)
    if not isinstance(tensor, DTensor):
        return local
    placements = [
        placement
        if len(weight.shape) == 3 and placement == Shard(0) and not gather_experts
        else Replicate()
        for placement in tensor.placements
    ]
    return tensor.redistribute(placements=placements).to_local()
