"""Kills TorchTitan's saves of main parameters with SIGKILL, and loads what is there afterwards.

    python tests/kill_saves.py [COUNT] [SEED]

Each of COUNT jobs of two ranks loads the latest checkpoint, checks that all of it is of one save
and that no save before was lost, and then saves one step after another until both ranks are
killed at a random time. Prints one JSON object with what was found.
"""

import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_patches

torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)

from managed_job import Job, default_options  # noqa: E402

from titan_fp8zero.checkpoint_files import UNFINISHED, find_checkpoints  # noqa: E402
from titan_fp8zero.sidecar import SIDECAR  # noqa: E402

RANKS = 2
SECONDS_OF_SAVES = 0.3
"""Within which the kill comes: a few saves."""
KEPT = 2
ASYNC_MODES = ("disabled", "async")


def run_rank(rank: int, folder: str, store: str, async_mode: str, told: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    try:
        job = Job(folder, keep_latest_k=KEPT, async_mode=async_mode)
        told.send(job.load())
        while True:
            told.send(job.save_next())
    except BaseException as error:
        told.send(f"rank {rank}: {error!r}")
        raise


def killed_job(folder: Path, async_mode: str, delay: float) -> list[Any]:
    """What rank 0 told before it was killed: the step it loaded, and those it saved."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="kill-saves-") as aside:
        ranks = [
            context.Process(
                target=run_rank,
                args=(rank, str(folder), f"{aside}/store", async_mode, sending),
                daemon=True,
            )
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        loaded = [receiving.recv() for _ in ranks]  # both start to save
        time.sleep(delay)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
    sending.close()
    told = loaded
    while receiving.poll():
        try:
            told.append(receiving.recv())
        except EOFError:
            break
    return told


def main(count: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    default_options()  # once, before processes fork
    found: Counter[str] = Counter()
    lost, half_loaded = [], []
    with tempfile.TemporaryDirectory(prefix="kill-saves-") as folder:
        checkpoints = Path(folder, "checkpoint")
        saved = 0
        for job in range(count + 1):  # the last one only loads what the kill before has left
            told = killed_job(
                Path(folder), ASYNC_MODES[job % 2], chance.uniform(0, SECONDS_OF_SAVES)
            )
            if errors := [entry for entry in told if isinstance(entry, str)]:
                half_loaded.append(f"job {job}: {errors[0]}")
                break
            if told[0] < saved:
                lost.append(f"job {job} loaded step {told[0]}, but step {saved} was saved")
            saved = max(told)
            found["saves"] += max(told) - told[0]
            found[_what_is_left(checkpoints)] += 1
            if len(find_checkpoints(checkpoints).complete) > KEPT + 2:
                raise AssertionError("old checkpoints are not purged")
    return {
        "kills": sum(found.values()) - found["saves"],
        **found,
        "lost": lost,
        "bad": half_loaded,
    }


def _what_is_left(checkpoints: Path) -> str:
    left = list(checkpoints.glob(f"{UNFINISHED}/*"))
    if not left:
        return "between saves"
    if any((path / SIDECAR).exists() for path in left):
        return "before the last rename"
    return "in a save"


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    result = main(*numbers, *(200, 0)[len(numbers) :])
    print(json.dumps(result))
    sys.exit(bool(result["lost"] or result["bad"]))
