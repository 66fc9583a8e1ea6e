"""Runs a function on several gloo ranks, each a process of its own, and brings back what it gave.

Ranks are forked from one server process that has imported torch already: a run of four takes a
fraction of a second, so that every test has fresh ranks, and one that aborts harms no other.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_patches
from titan_fp8zero.publish import IN_FLIGHT

TIMEOUT = 60.0
GRACE = 10.0
"""Seconds that ranks may go on after the first has failed: gloo tells most of them by then."""
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.tensor.debug",
    "hypothesis",
    "pytest",
    "titan_fp8zero",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_PRELOADED)


@dataclass
class Outcome:
    """How a rank ended: its return value, or a traceback or signal as `error`."""

    value: Any = None
    error: str | None = None


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end in time."""


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Return values of a module's top-level function, by rank, in a gloo process group.

    Raises RanksFailed with the ranks' tracebacks.
    """
    outcomes = rank_outcomes(function, num_ranks, *args, timeout=timeout)
    failed = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
    if failed:
        raise RanksFailed("\n".join(failed))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = TIMEOUT
) -> list[Outcome]:
    """As `run_ranks`, for functions that are meant to fail: raises nothing, leaves no process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, connections = [], []
        logs = [Path(folder, f"stderr-{rank}") for rank in range(num_ranks)]
        for rank in range(num_ranks):
            receiving, sending = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_run_rank,
                args=(rank, num_ranks, folder, timeout, sending, function, args),
                daemon=True,
            )
            process.start()
            sending.close()
            processes.append(process)
            connections.append(receiving)
        try:
            return _collect(connections, processes, logs, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    connections: list[Connection], processes: list[Any], logs: list[Path], deadline: float
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(connections):
        pending = {connections[r]: r for r in range(len(connections)) if r not in outcomes}
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in pending.values():
                error = f"did not end in time, killed\n{_last_words(logs[rank])}"
                outcomes[rank] = Outcome(error=error)
        for connection in ready:
            rank = pending[connection]
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join(GRACE)
                error = f"died, exit code {processes[rank].exitcode}\n{_last_words(logs[rank])}"
                outcomes[rank] = Outcome(error=error)
            if outcomes[rank].error is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
    return [outcomes[rank] for rank in range(len(connections))]


def _last_words(log: Path) -> str:
    """The end of what a rank that cannot speak any more wrote to stderr: why it aborted or hung."""
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _run_rank(
    rank: int,
    num_ranks: int,
    folder: str,
    timeout: float,
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    with open(f"{folder}/stderr-{rank}", "w") as log:
        os.dup2(log.fileno(), 2)  # C++ that aborts writes to the descriptor
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(timeout - 1, file=2)  # where a hang hangs
    # As TorchTitan's trainer does. torch 2.13 aborts where a collection meets a tensor in use by
    # another thread or a finalizer (an internal assert in THPVariable_clear): gloo has threads.
    gc.disable()
    torchtitan_patches.apply(["gloo_thread"])
    IN_FLIGHT["cpu"] = IN_FLIGHT["cuda"]  # all-gathers as on GPUs, which one gloo thread allows
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        outcome = Outcome(value=function(*args))
    except Exception:
        outcome = Outcome(error=traceback.format_exc())
    # Not Connection.send: it would share tensors through descriptors that die with this process.
    connection.send_bytes(pickle.dumps(outcome))
    connection.close()
    if outcome.error is not None:
        os._exit(1)  # the others learn it from their connections to this rank
    # A rank that leaves early breaks collectives that others have not finished: wait to be killed.
    time.sleep(timeout)
