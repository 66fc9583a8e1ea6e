"""TorchTitan's checkpoint manager, with checkpoints that are complete or absent, and checked."""

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.torch_version import TorchVersion
from torchtitan.components.checkpoint import MODEL, OPTIMIZER, AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from titan_fp8zero.checkpoint_errors import CheckpointError, on_all_ranks, told_by_all
from titan_fp8zero.checkpoint_files import (
    CheckpointReader,
    CheckpointWriter,
    find_checkpoints,
    finish_interrupted,
    retire,
    verify_checkpoint,
)
from titan_fp8zero.load_planner import StrictLoadPlanner
from titan_fp8zero.sidecar import read_key

_SKIPPED_STEPS = "skipped_steps"
_STAGER_IS_REUSABLE = TorchVersion(torch.__version__) >= "2.13"
"""Before, torch empties a stager after a save, and its next save fails (pytorch/pytorch#183413)."""


class CheckedCheckpointManager(CheckpointManager):
    """As stock, and:

    - a save that is killed leaves no broken checkpoint, and one that fails is an error on all
      ranks, of an asynchronous one at the next save or at the end;
    - the latest checkpoint is the latest complete one, and `keep_latest_k` counts complete ones;
    - a load checks the files first, and then that every entry fits: all ranks raise one
      CheckpointError before anything is changed.

    Hugging Face checkpoints are stock's. Takes TorchTitan's arguments, by name.
    """

    def __init__(self, *, checkpoint_config: Any, optimizers: Any, **stock: Any) -> None:
        self.enable, self.save_future = False, None  # a failed __init__ is closed too
        key_file = getattr(checkpoint_config, "key_file", "")
        self._key = on_all_ranks(lambda: read_key(key_file) if key_file else None)
        self._saving = ""
        self._zero1s = getattr(optimizers, "zero1s", ())
        super().__init__(checkpoint_config=checkpoint_config, optimizers=optimizers, **stock)

    # Saving.

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """As stock, through a `CheckpointWriter`."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        # Optimizers of other than main parameters skip nothing.
        notes = {_SKIPPED_STEPS: getattr(self.states[OPTIMIZER], _SKIPPED_STEPS, 0)}
        writer = CheckpointWriter(checkpoint_id, notes, self._key)
        self._saving = checkpoint_id
        saved: Future | AsyncSaveResponse | None = None
        with told_by_all(f"checkpoint {checkpoint_id} is not saved"):
            if async_mode == AsyncMode.ASYNC:
                saved = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
            elif async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                saved = dcp.async_save(
                    state_dict,
                    storage_writer=writer,
                    process_group=self.pg,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                    async_stager=self.stager,
                )
                if not _STAGER_IS_REUSABLE:
                    self.stager = None  # the next save makes another
            else:
                dcp.save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def _async_wait(self) -> None:
        future, self.save_future = self.save_future, None
        if future is None:
            return
        what = f"checkpoint {self._saving} is not saved"
        try:
            with told_by_all(what):
                future.result()
        except OSError as error:  # of the pipe to it
            raise CheckpointError(f"{what}: the process that saves is gone ({error!r})") from error

    def close(self) -> None:
        """Waits for an asynchronous save, and for what the last step publishes, unless an
        exception is on its way: another rank may have died, and both would wait for it."""
        if sys.exception() is None:
            if self.enable:
                self._async_wait()
            for zero1 in self._zero1s:
                zero1.wait_for_publish()
        super().close()

    def __del__(self) -> None:
        # Of a run that has ended or failed; stock closes here, but then no rank waits for another.
        super().close()

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or dist.get_rank() != 0:
            return
        found = find_checkpoints(Path(self.folder))
        if len(found.complete) <= self.keep_latest_k:
            return
        first_kept = sorted(found.complete)[-self.keep_latest_k]
        for step in sorted({*found.complete, *found.broken}):
            if step < first_kept:
                path = self._create_checkpoint_id(step)
                retire(Path(path))
                self.purge_queue.put(path)

    # Loading.

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """As stock, after clearing up what a killed save has left."""
        if self.enable and not self.load_only:
            on_all_ranks(self._clear_up)
        return super().load(step)

    def _clear_up(self) -> None:
        if dist.get_rank() != 0:
            return
        folder = Path(self.folder)
        finish_interrupted(folder)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # nothing was ever saved: `initial_load_path` holds

    def _find_load_step(self, folder: str = "") -> int:
        """The latest complete checkpoint, the same on all ranks, or -1."""
        steps = [-1]
        on_all_ranks(lambda: self._find_latest(folder or self.folder, steps))
        dist.broadcast_object_list(steps)
        return steps[0]

    def _find_latest(self, folder: str, steps: list[int]) -> None:
        if dist.get_rank() != 0:
            return
        found = find_checkpoints(Path(folder))
        told = "\n".join(found.broken.values())
        if found.broken and not found.complete:
            raise CheckpointError(
                f"{folder} has broken checkpoints only. Remove them to start anew:\n{told}"
            )
        if found.broken:
            logger.error(f"Not taken for checkpoints, they are broken:\n{told}")
        steps[0] = max(found.complete, default=-1)

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """As stock, after checking the files, and then all entries."""
        if from_hf:
            if self._key is not None:
                raise CheckpointError(
                    f"{checkpoint_id} is not signed, as all Hugging Face checkpoints: load it "
                    "without [checkpoint] key_file if you trust where it comes from"
                )
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        sidecar = verify_checkpoint(checkpoint_id, self._key)
        planner = StrictLoadPlanner(not_model=self.states.keys() - {MODEL})
        with told_by_all(f"checkpoint {checkpoint_id} cannot be loaded"):
            dcp.load(state_dict, storage_reader=CheckpointReader(checkpoint_id), planner=planner)
        self.states[MODEL].load_state_dict(state_dict)
        if OPTIMIZER in state_dict:
            notes = sidecar.notes if sidecar else {}
            self.states[OPTIMIZER].skipped_steps = notes.get(_SKIPPED_STEPS, 0)
