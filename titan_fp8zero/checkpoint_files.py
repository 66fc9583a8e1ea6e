"""Checkpoint directories that are complete or absent, with a checksum of every file.

DCP writes `step-10` aside, as `unfinished/step-10`. Each rank hashes its file while it writes it;
when all have written, rank 0 puts the hashes into a sidecar, `checksums.json`, and renames the
directory. A save that is killed leaves the checkpoints before it as they were, and something in
`unfinished/` that is no checkpoint, to stock TorchTitan either; if all but the last rename was
done, `finish_interrupted` does it.
"""

import hashlib
import logging
import os
import queue
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    _FileSystemWriter,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_fp8zero.checkpoint_errors import CheckpointError, on_all_ranks
from titan_fp8zero.sidecar import SIDECAR, FileChecksum, Sidecar, read_sidecar

logger = logging.getLogger("titan_fp8zero")

METADATA = ".metadata"
UNFINISHED = "unfinished"
"""Next to the checkpoints. No name that TorchTitan takes for a checkpoint's."""


# Writing.


class _HashedStream:
    """A file that is hashed as it is written, once, from front to end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._sha256 = hashlib.sha256()
        self._bytes = 0
        self.failure: OSError | None = None
        """Of a write. torch hides it behind an error of its own."""

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._bytes += memoryview(data).nbytes
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def fileno(self) -> int:
        self._stream.flush()  # for DCP, which syncs `.metadata` without
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def checksum(self) -> FileChecksum:
        return FileChecksum(self._bytes, self._sha256.hexdigest())


class _HashingFileSystem(FileSystem):
    """Remembers the checksum of every file written through it."""

    def __init__(self) -> None:
        self.written: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        hashed: Any = None
        try:
            with super().create_stream(path, mode) as stream:
                hashed = _HashedStream(stream)
                yield hashed
        except (OSError, RuntimeError) as error:
            failure = error if isinstance(error, OSError) else hashed and hashed.failure
            if not failure:
                raise
            raise CheckpointError(f"cannot write {path}: {failure}") from failure
        self.written[Path(path).name] = hashed.checksum

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class CheckpointWriter(_FileSystemWriter):
    """A DCP storage writer whose checkpoint is complete or absent, with a sidecar.

    For `dcp.save` and `dcp.async_save`, of threads and of processes. An existing checkpoint in
    its place is replaced when the new one is complete. (Not a `FileSystemWriter`: those stage
    asynchronous saves themselves, in another way than DCP's default.)

    Args:
        checkpoint: the directory to write, on a file system that all ranks share.
        notes: goes into the sidecar, that of rank 0.
        key: to sign the sidecar with.
    """

    _CHECKSUMS = MetadataIndex(SIDECAR)

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        notes: dict[str, Any] | None = None,
        key: bytes | None = None,
    ) -> None:
        self._checkpoint = Path(checkpoint)
        super().__init__(self._aside)
        self.fs = self._files = _HashingFileSystem()
        self._notes = notes or {}
        self._key = key

    @property
    def _aside(self) -> Path:
        return unfinished(self._checkpoint)

    @property
    def checkpoint_id(self) -> str | os.PathLike:
        return self._checkpoint

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        if checkpoint_id:
            self._checkpoint = Path(checkpoint_id)
        super().reset(self._aside)
        self.fs = self._files = _HashingFileSystem()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("rank 0 completes a checkpoint: save with use_collectives=True")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # rank 0 makes the directory before any rank writes

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._aside.exists():
            remove_checkpoint(self._aside)
        self.fs.mkdir(self._aside)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        # Checksums reach rank 0 the way that DCP's own results do.
        results.append(WriteResult(self._CHECKSUMS, 0, self._files.written))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _write_data(
        self, planner: SavePlanner, file_queue: "queue.Queue[tuple[Any, str, list[WriteItem]]]"
    ) -> Future[list[WriteResult]]:
        """One item in memory at a time; DCP's own loop keeps all until the file is written."""
        results: list[WriteResult] = []
        while not file_queue.empty():
            path, name, items = file_queue.get_nowait()
            with self.fs.create_stream(path, "wb") as stream:
                for item in items:
                    results.append(self._write_item(planner, stream, item, name))
                os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def _write_item(
        self, planner: SavePlanner, stream: Any, item: WriteItem, name: str
    ) -> WriteResult:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            data = data.detach().cpu()
            if data.untyped_storage().nbytes() != data.nbytes:
                data = data.clone()  # torch.save writes whole storages
        return _write_item(self.transforms, stream, data, item, name, self.serialization_format)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {}
        for of_rank in results:
            files.update(of_rank.pop().storage_data)
        super().finish(metadata, results)
        files[METADATA] = self._files.written[METADATA]
        _write_durably(self._aside / SIDECAR, Sidecar(files, self._notes).to_json(self._key))
        _put_in_place(self._aside, self._checkpoint)


class CheckpointReader(FileSystemReader):
    """DCP's reader, with one stored box in memory at a time; DCP keeps the one before, too."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            super().read_data(LoadPlan([item]), planner).wait()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def unfinished(checkpoint: Path) -> Path:
    """Where a checkpoint is written."""
    return checkpoint.parent / UNFINISHED / checkpoint.name


def _write_durably(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f"{path.name}.tmp")
    with aside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _put_in_place(aside: Path, checkpoint: Path) -> None:
    """The last steps of a save: killed before they end, they can be done again."""
    if checkpoint.exists():
        remove_checkpoint(checkpoint)
    aside.rename(checkpoint)
    _sync_directory(checkpoint.parent)
    if not any(aside.parent.iterdir()):
        aside.parent.rmdir()


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a directory; killed at any time, what is left is no checkpoint to anyone."""
    retire(checkpoint)
    shutil.rmtree(checkpoint)


def retire(checkpoint: Path) -> None:
    """Make a checkpoint none, in one step, before it is removed."""
    (checkpoint / METADATA).unlink(missing_ok=True)


# Finding.


@dataclass(frozen=True)
class Found:
    """The checkpoints in a folder."""

    complete: dict[int, Path]
    """By step."""
    broken: dict[int, str]
    """What is wrong with the others, by step."""


def find_checkpoints(folder: Path) -> Found:
    """All `step-N` in a folder: which are complete, without reading their contents."""
    complete, broken = {}, {}
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, step = path.name.partition("step-")
        if name or not step.isdecimal():
            continue
        if reason := why_incomplete(path):
            broken[int(step)] = reason
        else:
            complete[int(step)] = path
    return Found(complete, broken)


def why_incomplete(checkpoint: Path) -> str | None:
    """What is missing of a checkpoint, or None: every file is there, in its full size.

    Without a sidecar, as from stock TorchTitan, that is known of DCP's `.metadata` only.
    """
    if not (checkpoint / METADATA).is_file():
        if _is_hugging_face(checkpoint):
            return None
        return f"{checkpoint} is no complete checkpoint: {METADATA} is missing"
    try:
        sidecar = read_sidecar(checkpoint)
    except CheckpointError as error:
        return str(error)
    wrong = [_wrong_size(checkpoint / n, c) for n, c in sidecar.files.items()] if sidecar else []
    return next(filter(None, wrong), None)


def _is_hugging_face(checkpoint: Path) -> bool:
    """As TorchTitan tells: with `last_save_in_hf` the last one of a run is."""
    return (checkpoint / "model.safetensors.index.json").is_file()


def finish_interrupted(folder: Path) -> None:
    """Do what is left of a save into a folder that was killed: its last rename, or clearing it.

    For one rank, while no save runs.
    """
    aside_folder = folder / UNFINISHED
    if not aside_folder.is_dir():
        return
    for aside in sorted(aside_folder.iterdir()):
        checkpoint = folder / aside.name
        is_written = (aside / SIDECAR).is_file() and why_incomplete(aside) is None
        if is_written and not (checkpoint.exists() and why_incomplete(checkpoint) is None):
            logger.warning("finishing %s, whose save was interrupted when all was written", aside)
            _put_in_place(aside, checkpoint)
        else:
            logger.warning("removing %s: its save was interrupted, it is no checkpoint", aside)
            remove_checkpoint(aside)
    if aside_folder.exists():
        aside_folder.rmdir()


# Checking.


def verify_checkpoint(
    checkpoint: str | os.PathLike[str], key: bytes | None = None
) -> Sidecar | None:
    """Check every file against the sidecar, before any is unpickled. A collective.

    Files are shared out over the ranks. Returns the sidecar, or None where there is none and
    hence nothing was checked.

    Raises CheckpointError on all ranks, with every file that is missing, of another size or
    content; with a key, also if there is no signature of this key.
    """
    path = Path(checkpoint)
    sidecar = on_all_ranks(lambda: _read_complete(path, key))
    if sidecar is None:
        logger.warning("%s has no checksums (%s): loaded unchecked", path, SIDECAR)
        return None
    try:
        on_all_ranks(lambda: _check_share(path, sidecar))
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is not loaded. Remove it to go on from another checkpoint:\n{error}"
        ) from None
    return sidecar


def _read_complete(checkpoint: Path, key: bytes | None) -> Sidecar | None:
    if not (checkpoint / METADATA).is_file():
        if _is_hugging_face(checkpoint):
            raise CheckpointError(
                f"{checkpoint} holds Hugging Face safetensors, weights to start from: give it as "
                "--checkpoint.initial_load_path with --checkpoint.initial_load_in_hf in a new dump "
                "folder. Or resume an earlier checkpoint: --checkpoint.load_step"
            )
        raise CheckpointError(
            f"{checkpoint} holds no complete checkpoint: its {METADATA} is missing"
        )
    return read_sidecar(checkpoint, key)


def _check_share(checkpoint: Path, sidecar: Sidecar) -> None:
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    by_size = sorted(sidecar.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    wrong = [
        _wrong_size(checkpoint / name, checksum) or _wrong_content(checkpoint / name, checksum)
        for name, checksum in by_size[rank::num_ranks]
    ]
    if told := "\n".join(filter(None, wrong)):
        raise CheckpointError(told)


def _wrong_size(file: Path, checksum: FileChecksum) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    size = file.stat().st_size
    if size != checksum.bytes:
        return f"{file} is damaged: it has {size} bytes instead of {checksum.bytes}"
    return None


def _wrong_content(file: Path, checksum: FileChecksum) -> str | None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != checksum.sha256:
        return f"{file} is damaged: its SHA-256 is {found} instead of {checksum.sha256}"
    return None
