"""Runs a Python module on several ranks of this machine, through torchrun's own agent."""

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SHUTDOWN_SECONDS = 10
"""How long ranks may take to end when a signal ends the run, before they are killed. (Where a rank
has failed, and in torch 2.11, always 30.)"""

TRACEBACK_LINES = 15
DIRECT_CAUSE = "\nThe above exception was the direct cause of the following exception:\n"
"""Between the tracebacks of `raise ... from ...`, as Python prints them."""


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended: its exit code, below zero for a signal, and the end of its error output."""

    rank: int
    exit_code: int
    error: str


class RanksFailed(Exception):
    """At least one rank failed. `failures` holds what is known, the likely cause first."""

    def __init__(self, failures: list[RankFailure]) -> None:
        self.failures = failures
        cause, *others = failures
        lines = [f"rank {cause.rank} failed (exit code {cause.exit_code}):", cause.error]
        for other in others:
            last = (other.error.splitlines() or [""])[-1]
            lines.append(f"rank {other.rank} failed too (exit code {other.exit_code}): {last}")
        super().__init__("\n".join(lines))


def run_on_ranks(module: str, args: list[str], nproc: int, shown_ranks: set[int]) -> None:
    """Runs `python -m module args` on `nproc` ranks and returns when all have ended well.

    The output of `shown_ranks` appears as it comes, prefixed by the rank. A signal that ends this
    process (Ctrl-C too) ends the ranks first and is raised as torch's `SignalException`.

    Raises:
        RanksFailed: a rank failed; the others have been ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the same by its older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # TorchTitan warns where the rank that knows the loss is not in here.
    os.environ["LOG_RANK"] = ",".join(map(str, sorted(shown_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    with tempfile.TemporaryDirectory(prefix="titan-fp8zero-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(logs, tee=Std.ALL, local_ranks_filter=shown_ranks),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", module, *args)
        except ChildFailedError as error:
            raise RanksFailed(list(_failures(error, Path(logs)))) from None


def _failures(error: ChildFailedError, logs: Path) -> Iterator[RankFailure]:
    """In the order in which they happened, without the ranks that the agent ended therefore."""
    failures = sorted(error.failures.items(), key=lambda item: _time_of(item[1]))
    ended_themselves = [item for item in failures if item[1].signal_name() != "SIGTERM"]
    for rank, failure in ended_themselves or failures:
        yield RankFailure(rank, failure.exitcode, _error_text(failure, rank, logs))


def _time_of(failure: ProcessFailure) -> float:
    # A failure's own timestamp is in whole seconds: too coarse to tell cause from consequence.
    error_file = Path(failure.error_file)
    return error_file.stat().st_mtime if error_file.is_file() else failure.timestamp


def _error_text(failure: ProcessFailure, rank: int, logs: Path) -> str:
    """The end of the rank's traceback, and its causes; without one, the end of its stderr."""
    causes: list[str] = []
    if isinstance(failure.message, dict):
        *causes, text = failure.message["extraInfo"]["py_callstack"].split(DIRECT_CAUSE)
    else:
        text = "".join(log.read_text() for log in logs.glob(f"*/attempt_0/{rank}/stderr.log"))
        if failure.exitcode < 0:
            text += f"\nkilled by {failure.signal_name()}"
    lines = text.strip().splitlines()[-TRACEBACK_LINES:]
    lines += [f"caused by {cause.strip().splitlines()[-1]}" for cause in reversed(causes)]
    return "\n".join(lines)
