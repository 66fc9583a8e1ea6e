"""What a model's checkpoint holds and how Hugging Face names it: all that interchange needs."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from titan_fp8zero.blocks import scale_shape
from titan_fp8zero.hf_names import SCALE_SUFFIX, Piece, ToHF, pieces_of


class Entry(NamedTuple):
    """An entry of a model's state dict, a parameter or a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the exported values: `float8_e4m3fn` for an FP8 weight, or that of the compute weight."""

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.float8_e4m3fn


class HFTensor(NamedTuple):
    """A tensor under its Hugging Face name, with its scales if it is FP8."""

    fqn: str
    piece: Piece
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all that is stored of it, by name."""
        if self.dtype != torch.float8_e4m3fn:
            return {self.name: self.shape}
        return {self.name: self.shape, self.name + SCALE_SUFFIX: scale_shape(self.shape)}

    @property
    def nbytes(self) -> int:
        values, *scales = (torch.Size(shape).numel() for shape in self.shapes.values())
        return values * self.dtype.itemsize + sum(scales) * torch.float32.itemsize


@dataclass(frozen=True)
class ModelSpec:
    """The state dict of a model, by FQN, in its own order."""

    entries: dict[str, Entry]
    tied: dict[str, str]
    """Further names of tied weights, and the entry that each is."""
    to_hf: ToHF

    @cached_property
    def hf_tensors(self) -> list[HFTensor]:
        """Every tensor that Hugging Face's format has a name for; tied weights once."""
        return [
            HFTensor(fqn, piece, shape if piece.expert is None else shape[1:], dtype)
            for fqn, (shape, dtype) in self.entries.items()
            for piece in pieces_of(fqn, shape, self.to_hf)
        ]

    @cached_property
    def unnamed(self) -> list[str]:
        """Entries that the format has no name for."""
        named = {tensor.fqn for tensor in self.hf_tensors}
        return [fqn for fqn in self.entries if fqn not in named]

    @property
    def dcp_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what a DCP checkpoint of the model holds: tied weights under every name."""
        shapes = {fqn: entry.shape for fqn, entry in self.entries.items()}
        return shapes | {fqn: shapes[source] for fqn, source in self.tied.items()}
