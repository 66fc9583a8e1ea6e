"""Hugging Face safetensors, in FP8 or not, as a DCP checkpoint of a model.

Main parameters start from the dequantized values. Quantized again, those give the same values with
power-of-two scales, and the same codes with scales within one ulp otherwise.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from titan_fp8zero.blocks import dequantize_blockwise, scale_shape
from titan_fp8zero.checkpoint import TensorWrapper
from titan_fp8zero.checkpoint_errors import CheckpointError, told_by_all
from titan_fp8zero.checkpoint_files import CheckpointWriter
from titan_fp8zero.hf_names import SCALE_SUFFIX
from titan_fp8zero.mismatch import Mismatch, compare_shapes
from titan_fp8zero.model_spec import HFTensor, ModelSpec
from titan_fp8zero.safetensors_folder import CONFIG, SafetensorsFolder, Stored

FP8 = "F8_E4M3"
UNQUANTIZED = ("F32", "BF16", "F16")


def import_checkpoint(
    source: SafetensorsFolder,
    checkpoint: Path,
    spec: ModelSpec,
    *,
    config: Mapping[str, Any] | None = None,
    is_ignored: Callable[[str], bool] = lambda name: False,
    key: bytes | None = None,
) -> None:
    """Write a folder of safetensors files as a DCP checkpoint of a model's fp32 weights.

    Weights with a `weight_scale_inv` are dequantized; others are in fp32, bf16 or fp16. Entries
    that the format has no name for become zeros. Memory holds one tensor. With a `key` the
    checkpoint is signed.

    Raises Mismatch that lists all that is missing, unknown (but for names that `is_ignored`), or
    of another shape or dtype, and fields of `config` that the source's own contradicts;
    CheckpointError if a weight is not finite, or the checkpoint cannot be written.
    """
    found = {name: stored for name, stored in source.tensors.items() if not is_ignored(name)}
    differences = _differences(found, spec) + [
        f"{CONFIG}: {key} {source.config[key]}, expected {value}"
        for key, value in (config or {}).items()
        if source.config.get(key, value) != value
    ]
    if differences:
        raise Mismatch(source.path, differences)
    parts: dict[str, list[HFTensor]] = {fqn: [] for fqn in spec.entries}
    for tensor in spec.hf_tensors:
        parts[tensor.fqn].append(tensor)
    state: dict[str, torch.Tensor] = {}
    for fqn, shape in spec.dcp_shapes.items():
        tensors = parts[spec.tied.get(fqn, fqn)]
        state[fqn] = StreamedWeight(shape, tensors, source) if tensors else torch.zeros(shape)
    with told_by_all(f"{checkpoint} is not written"):
        dcp.save(state, storage_writer=CheckpointWriter(checkpoint, key=key), no_dist=True)


def _differences(found: dict[str, Stored], spec: ModelSpec) -> list[str]:
    needed, wrong = {}, []
    for tensor in spec.hf_tensors:
        needed[tensor.name] = tensor.shape
        stored = found.get(tensor.name)
        if stored is None:
            continue
        if stored.dtype == FP8 and len(tensor.shape) == 2:
            scale = tensor.name + SCALE_SUFFIX
            needed[scale] = scale_shape(tensor.shape)
            if scale in found and found[scale].dtype != "F32":
                wrong.append(f"{scale}: dtype {found[scale].dtype}, expected F32")
        elif stored.dtype not in UNQUANTIZED:
            expected = f"one of {', '.join(UNQUANTIZED)}, or of a matrix {FP8}"
            wrong.append(f"{tensor.name}: dtype {stored.dtype}, expected {expected}")
    return compare_shapes(needed, {name: stored.shape for name, stored in found.items()}) + wrong


class StreamedWeight(TensorWrapper):
    """A weight as DCP saves it: each piece is read and dequantized when it is written."""

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], tensors: list[HFTensor], folder: SafetensorsFolder
    ) -> "StreamedWeight":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(
        self, shape: tuple[int, ...], tensors: list[HFTensor], folder: SafetensorsFolder
    ) -> None:
        self._folder = folder
        self._at = {self._chunk(tensor).offsets: tensor for tensor in tensors}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any, kwargs: Any = None
    ) -> torch.Tensor:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of {args[0]}")

    def _chunk(self, tensor: HFTensor) -> ChunkStorageMetadata:
        shape, expert = self.shape, tensor.piece.expert
        if expert is None:
            return ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
        offset = (expert, *[0] * len(shape[1:]))
        return ChunkStorageMetadata(torch.Size(offset), torch.Size((1, *shape[1:])))

    def __create_write_items__(self, fqn: str, weight: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, (chunk := self._chunk(tensor)).offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for tensor in self._at.values()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        tensor = self._at[index.offset]
        values = tensor.piece.restore(_dequantized(tensor.name, self._folder))
        return values.view(self._chunk(tensor).sizes)


def _dequantized(name: str, folder: SafetensorsFolder) -> torch.Tensor:
    values = folder.read(name)
    if folder.tensors[name].dtype == FP8:
        values = dequantize_blockwise(values, folder.read(name + SCALE_SUFFIX))
    if not values.isfinite().all():
        raise CheckpointError(f"{name} of {folder.path}, or its scales, has values not finite")
    return values.float()
