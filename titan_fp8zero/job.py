"""A training run as a command line names it: a TorchTitan config, overrides and a number of ranks,
checked before any rank is started."""

import logging
import math
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_fp8zero.metrics_file import METRICS_FILE
from titan_fp8zero.progress import show_progress
from titan_fp8zero.spawn import run_on_ranks

DEFAULT_CPU_RANKS = 2


class BadInput(Exception):
    """What the user gave does not work; the message says what to change."""


@dataclass(frozen=True)
class Job:
    """A checked training run."""

    config_file: Path
    overrides: list[str]
    config: Any  # TorchTitan's JobConfig, merged with the config's own module
    nproc: int

    @property
    def metrics_file(self) -> Path:
        return Path(self.config.job.dump_folder) / METRICS_FILE

    @property
    def batch_degree(self) -> int:
        """How many ranks read data of their own."""
        parallelism = self.config.parallelism
        return self.nproc // (
            parallelism.context_parallel_degree
            * parallelism.tensor_parallel_degree
            * parallelism.pipeline_parallel_degree
        )

    def train(self) -> None:
        """Trains on `nproc` ranks of this machine, and shows TorchTitan's log and the progress."""
        with show_progress(self.metrics_file, self.config.training.steps):
            run_on_ranks(
                "titan_fp8zero.launch",
                ["--job.config_file", str(self.config_file), *self.overrides],
                self.nproc,
                shown_ranks={0, self._metrics_rank()},
            )

    def _metrics_rank(self) -> int:
        """The rank that knows the loss: the first of the last pipeline stage."""
        parallelism = self.config.parallelism
        stages = parallelism.pipeline_parallel_degree
        if parallelism.pipeline_parallel_schedule == "ZBVZeroBubble":
            return 0
        return self.nproc // stages * (stages - 1)


def load_job(config_file: Path, overrides: list[str], nproc: int | None) -> Job:
    """Parses a config as TorchTitan does and checks that it fits this machine.

    Raises:
        BadInput: the file is missing or no TOML, has keys that TorchTitan or we do not know, or
            its mesh does not fit the number of ranks. (Overrides that TorchTitan does not know
            end the process with TorchTitan's own message.)
    """
    config = parse_config(config_file, overrides)
    job = Job(config_file, overrides, config, _number_of_ranks() if nproc is None else nproc)
    _check_devices(job)
    _check_mesh(job, "--nproc")
    return job


def load_planned_job(config_file: Path, overrides: list[str], world_size: int | None) -> Job:
    """As `load_job`, for any number of ranks: they need not fit this machine.

    Without `world_size` the config's degrees say how many ranks there are; BadInput if they do not.
    """
    config = parse_config(config_file, overrides)
    job = Job(config_file, overrides, config, world_size or _planned_ranks(config))
    _check_mesh(job, "--world-size")
    return job


def _planned_ranks(config: Any) -> int:
    degrees = _degrees(config).values()
    if -1 in degrees:
        raise BadInput(
            "[parallelism] data_parallel_shard_degree = -1 takes all ranks that there are: say how "
            "many with --world-size, or set the degree"
        )
    return math.prod(degrees)


def parse_config(config_file: Path, overrides: list[str]) -> Any:
    """TorchTitan's JobConfig of a TOML file and overrides; raises BadInput, as `load_job`."""
    if not config_file.is_file():
        raise BadInput(f"config file {config_file}: no such file")
    try:
        tomllib.loads(config_file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"config file {config_file} is not TOML: {error}") from None

    from torchtitan.config import ConfigManager

    try:
        with quiet():  # the ranks parse it again, and log what there is to say
            return ConfigManager().parse_args(["--job.config_file", str(config_file), *overrides])
    except (ValueError, ImportError) as error:
        raise BadInput(f"config file {config_file}: {error}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Log errors only."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _number_of_ranks() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else DEFAULT_CPU_RANKS


def _check_devices(job: Job) -> None:
    if job.nproc < 1:
        raise BadInput(f"--nproc {job.nproc}: at least one rank is needed")
    if torch.cuda.is_available() and job.nproc > torch.cuda.device_count():
        raise BadInput(
            f"--nproc {job.nproc}: this machine has {torch.cuda.device_count()} GPUs, and each "
            "rank takes one"
        )


def _degrees(config: Any) -> dict[str, int]:
    keys = (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
    )
    return {key: getattr(config.parallelism, key) for key in keys}


def _check_mesh(job: Job, option: str) -> None:
    degrees = _degrees(job.config)
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    fits = job.nproc % fixed == 0 if -1 in degrees.values() else job.nproc == fixed
    if not fits:
        mesh = ", ".join(f"{key} = {degree}" for key, degree in degrees.items() if degree != 1)
        raise BadInput(
            f"{job.nproc} ranks do not fit the mesh of {job.config_file}, which needs "
            f"{'a multiple of ' if -1 in degrees.values() else ''}{fixed}: [parallelism] "
            f"{mesh or 'with every degree 1'}. Change {option} or a degree."
        )
    _check_expert_mesh(job, degrees, option)


def _check_expert_mesh(job: Job, degrees: dict[str, int], option: str) -> None:
    parallelism = job.config.parallelism
    experts = parallelism.expert_parallel_degree
    if experts == 1:
        return
    shared = job.nproc // (
        degrees["data_parallel_replicate_degree"] * degrees["pipeline_parallel_degree"]
    )
    if shared % (experts * parallelism.expert_tensor_parallel_degree):
        raise BadInput(
            f"[parallelism] expert_parallel_degree = {experts} (times "
            f"expert_tensor_parallel_degree = {parallelism.expert_tensor_parallel_degree}) of "
            f"{job.config_file} does not divide the {shared} ranks that share one copy of the "
            f"experts. Change {option} or the degree."
        )
