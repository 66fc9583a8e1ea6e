"""What `titan-fp8zero plan` does."""

from pathlib import Path
from typing import Literal

from titan_fp8zero.console import stdout_console
from titan_fp8zero.job import Job
from titan_fp8zero.layout import STRATEGIES, Strategy
from titan_fp8zero.titan.config import options_of
from titan_fp8zero.titan.planner.costs import Bandwidths
from titan_fp8zero.titan.planner.drawing import draw_plan
from titan_fp8zero.titan.planner.plan import make_plan
from titan_fp8zero.titan.planner.record import write_json
from titan_fp8zero.titan.planner.tables import print_plan


def run_plan(
    job: Job,
    strategy: Strategy | Literal["both"] | None,
    bandwidths: tuple[float, float],
    *,
    json_file: Path | None,
    image: Path | None,
) -> None:
    """Prints a plan, and writes it where files are named.

    Args:
        strategy: of which to show the layout; None for the config's own.
        bandwidths: network and memory, as in `Bandwidths`.
    """
    plan = make_plan(job)
    strategies = _strategies(job, strategy)
    speeds = Bandwidths(*bandwidths)
    print_plan(plan, strategies, speeds, stdout_console())
    if json_file is not None:
        write_json(plan, strategies, speeds, json_file)
        print(f"written to {json_file}")
    if image is not None:
        draw_plan(plan, strategies, image)
        print(f"drawn in {image}")


def _strategies(job: Job, strategy: Strategy | Literal["both"] | None) -> tuple[Strategy, ...]:
    if strategy == "both":
        return STRATEGIES
    return (strategy or options_of(job.config).strategy,)
