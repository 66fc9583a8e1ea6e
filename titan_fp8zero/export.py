"""A DCP checkpoint as Hugging Face safetensors, in the FP8 layout that DeepSeek-V3 publishes.

Every FP8 weight is quantized from its fp32 main parameter as training does, so that codes and
scales are those that training computed with.
"""

import logging
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch

from titan_fp8zero.blocks import ScaleFormat, quantize_main
from titan_fp8zero.dcp_folder import DCPFolder
from titan_fp8zero.hf_names import SCALE_SUFFIX
from titan_fp8zero.mismatch import Mismatch, compare_shapes
from titan_fp8zero.model_spec import HFTensor, ModelSpec
from titan_fp8zero.safetensors_folder import shard_names, write_shards

logger = logging.getLogger("titan_fp8zero")

TRAINING_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
"""Prefixes of what a checkpoint of a run holds besides the model."""


def export_checkpoint(
    source: DCPFolder,
    folder: Path,
    spec: ModelSpec,
    *,
    scale_format: ScaleFormat = "fp32",
    round_main_to_bf16: bool = False,
    shard_bytes: int = 5 * 10**9,
) -> Iterator[str]:
    """Write the model of a DCP checkpoint to safetensors files in `folder`; yields their names.

    FP8 weights become `weight` in e4m3 and `weight_scale_inv` in fp32
    `[ceil(R/128), ceil(C/128)]`, experts one by one. Where the format orders rows across 128-row
    blocks, weights are quantized in that order, and named in the log. Memory holds one file of at
    most `shard_bytes` (or one tensor) and the fp32 values of one weight's part in it.

    Raises Mismatch that lists all that is missing, unknown, of another shape, or has a value that
    the format cannot express.
    """
    _check(source, spec)
    for tensor in spec.hf_tensors:
        if spec.entries[tensor.fqn].is_fp8 and not tensor.piece.keeps_blocks:
            logger.warning(
                "%s is quantized anew: the format orders its rows across blocks", tensor.fqn
            )

    def read(shard: list[HFTensor]) -> dict[str, torch.Tensor]:
        written: dict[str, torch.Tensor] = {}
        for fqn, tensors in groupby(shard, key=lambda tensor: tensor.fqn):
            written |= _converted(source, fqn, list(tensors), scale_format, round_main_to_bf16)
        return written

    shards = _split_into_shards(spec.hf_tensors, shard_bytes)
    names = shard_names(len(shards))
    yield from write_shards(
        folder, ((name, read(shard)) for name, shard in zip(names, shards, strict=True))
    )


def _check(source: DCPFolder, spec: ModelSpec) -> None:
    found = {
        name: tuple(entry.size)
        for name, entry in source.tensors.items()
        if not name.startswith(TRAINING_STATE)
    }
    differences = compare_shapes(spec.dcp_shapes, found)
    # Buffers that a model has and never uses: TorchTitan's expert bias without load balancing.
    differences += [
        f"{fqn} is not zero, and the format has no name for it"
        for fqn in spec.unnamed
        if found.get(fqn) == spec.entries[fqn].shape and source.read(fqn).any()
    ]
    if differences:
        raise Mismatch(source.path, differences)
    rounded = [
        fqn
        for fqn, entry in spec.entries.items()
        if entry.is_fp8 and source.tensors[fqn].properties.dtype != torch.float32
    ]
    if rounded:
        logger.warning(
            "%s holds no fp32 main parameters of %d FP8 weights (%s, ...): they are quantized from "
            "rounded values, and are not those that training computed with",
            source.path,
            len(rounded),
            rounded[0],
        )


def _split_into_shards(tensors: list[HFTensor], shard_bytes: int) -> list[list[HFTensor]]:
    """Consecutive tensors of at most `shard_bytes` together, or a larger one alone."""
    shards: list[list[HFTensor]] = []
    filled = shard_bytes
    for tensor in tensors:
        if not shards or filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _converted(
    source: DCPFolder,
    fqn: str,
    tensors: list[HFTensor],
    scale_format: ScaleFormat,
    round_main_to_bf16: bool,
) -> dict[str, torch.Tensor]:
    """Consecutive pieces of one weight, read together, as the file stores them."""
    first, last = tensors[0].piece.expert, tensors[-1].piece.expert
    if first is None or last is None:
        weight = source.read(fqn)
    else:
        weight = source.read(fqn, first, last + 1)
    written = {}
    for tensor in tensors:
        values = tensor.piece.take(weight, first or 0)
        if tensor.dtype != torch.float8_e4m3fn:
            written[tensor.name] = values.to(tensor.dtype, copy=True)
            continue
        codes, scale_inv = quantize_main(values, scale_format, round_main_to_bf16)
        written |= {tensor.name: codes, tensor.name + SCALE_SUFFIX: scale_inv}
    return written
