"""What folders of Hugging Face safetensors hold, to the bit."""

from pathlib import Path

import torch
from safetensors.torch import load_file

FP8 = torch.float8_e4m3fn


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in sorted(a.keys() | b.keys())
        if name not in a or name not in b or not same_bits(a[name], b[name])
    ]
