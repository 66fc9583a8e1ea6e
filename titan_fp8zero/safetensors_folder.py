"""A folder of safetensors files and their index, as Hugging Face lays out large models."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from titan_fp8zero.mismatch import Mismatch

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG = "config.json"


class Stored(NamedTuple):
    """A tensor of a safetensors file, as its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: "F8_E4M3", "BF16", "F32", ..."""


class SafetensorsFolder:
    """Reads tensors one at a time, from files that its index names, or from the only file.

    Raises Mismatch that lists every file that is missing, unreadable or no safetensors file, and
    every tensor that is not in the file which the index names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        weight_map = self._weight_map()
        self.tensors: dict[str, Stored] = {}
        unread: dict[str, str] = {}
        for file in sorted(set(weight_map.values()) or {SINGLE_FILE}):
            try:
                self.tensors |= _headers(path / file)
            except FileNotFoundError:
                unread[file] = "missing file"
            except OSError as error:
                unread[file] = f"unreadable file ({error})"
            except SafetensorError as error:
                unread[file] = f"no whole safetensors file ({error})"
        problems = [f"{reason}: {file}" for file, reason in unread.items()]
        problems += [
            f"{name} is not in {file}, where {INDEX} has it"
            for name, file in weight_map.items()
            if file not in unread
            and (name not in self.tensors or self.tensors[name].file.name != file)
        ]
        if problems:
            raise Mismatch(path, problems)

    def _weight_map(self) -> dict[str, str]:
        if not self.path.is_dir():
            raise Mismatch(self.path, ["no such directory"])
        index = self.path / INDEX
        if not index.is_file():
            if not (self.path / SINGLE_FILE).is_file():
                raise Mismatch(self.path, [f"it has neither {INDEX} nor {SINGLE_FILE}"])
            return {}
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise Mismatch(self.path, [f"{INDEX} has no weight_map: {error!r}"]) from None
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise Mismatch(self.path, [f"{INDEX} has {file!r} as the file of {name}"])
        return weight_map

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`; empty without one. Raises Mismatch if it is no JSON object."""
        file = self.path / CONFIG
        try:
            config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise Mismatch(self.path, [f"{CONFIG} is no JSON: {error}"]) from None
        if not isinstance(config, dict):
            raise Mismatch(self.path, [f"{CONFIG} is no JSON object, but {config!r}"])
        return config

    def read(self, name: str) -> torch.Tensor:
        """A tensor, whole."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            return file.get_tensor(name)


def _headers(path: Path) -> dict[str, Stored]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Stored(path, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }


def shard_names(count: int) -> list[str]:
    """The names of `count` files: `model-00001-of-00003.safetensors` and so on."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_shards(
    path: Path, shards: Iterable[tuple[str, Mapping[str, torch.Tensor]]]
) -> Iterator[str]:
    """Write named files of tensors one by one, and the index when all are there; yields the names.

    Only the file that is being written is held in memory.
    """
    path.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total_size = 0
    for file, tensors in shards:
        save_file(dict(tensors), path / file, metadata={"format": "pt"})
        (path / file).chmod(path.stat().st_mode & 0o666)  # safetensors leaves it to its owner alone
        weight_map |= dict.fromkeys(tensors, file)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        yield file
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
