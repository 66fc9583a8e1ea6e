"""A DCP checkpoint that one process reads in parts."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_fp8zero.checkpoint import Geometry, UnitRun, WeightView
from titan_fp8zero.checkpoint_errors import CheckpointError, told_by_all
from titan_fp8zero.checkpoint_files import METADATA, CheckpointReader, verify_checkpoint


class DCPFolder:
    """Reads tensors of a DCP checkpoint, whole or a range of dim 0.

    Raises CheckpointError if there is none, or its files are damaged or missing; with a key, also
    if it is not signed with it.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        sidecar = verify_checkpoint(path, key)
        self.path = path
        self._reader = _Reader(path)
        metadata = self._reader.read_metadata()
        if sidecar is None:
            files = {info.relative_path for info in metadata.storage_data.values()}
            if missing := sorted(file for file in files if not (path / file).is_file()):
                raise CheckpointError(f"{path} lacks {', '.join(missing)}")
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """A tensor in fp32; with `start` and `end`, that range of its dim 0."""
        shape = tuple(self.tensors[name].size)
        offset, size = [0] * len(shape), list(shape)
        if end is not None:
            offset[0], size[0] = start, end - start
        part = torch.empty(size)
        geometry = Geometry(shape, tuple(offset), tuple(size), is_tiled=False)
        view = WeightView(geometry, (UnitRun(0, part.view(-1)),), part.dtype, part.device)
        with told_by_all(f"{name} of {self.path} cannot be read"):
            dcp.load({name: view}, storage_reader=self._reader, no_dist=True)
        return part


class _Reader(CheckpointReader):
    """Reads the metadata once: that of a large model takes longer than a weight."""

    @cache  # noqa: B019, lives as long as its folder
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return super().read_metadata(*args, **kwargs)
        except Exception as error:  # what pickle raises of a damaged file can be any
            raise CheckpointError(f"{Path(self.path) / METADATA} is damaged: {error!r}") from None
