"""The model converter `blockwise_fp8`: which modules compute in FP8, chosen by FQN."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn as nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_fp8zero.backends import choose_backend
from titan_fp8zero.experts import BlockwiseFP8GroupedExperts
from titan_fp8zero.job import BadInput, Job
from titan_fp8zero.linear import BlockwiseFP8Linear
from titan_fp8zero.titan.config import options_of

CONVERTER = "blockwise_fp8"
DEFAULT = "default"
DEFAULT_PATTERNS = (
    "layers.*.attention.*",
    "layers.*.feed_forward.*",
    "layers.*.moe.experts",
    "layers.*.moe.shared_experts.*",
)
NEVER = ("output", "*.router.gate")
"""High-precision whatever the patterns say, as in DeepSeek-V3: the output head and router gates."""


def check_converts(job: Job, purpose: str) -> None:
    """Raises BadInput where a config does not convert its model: there is nothing to `purpose`."""
    if CONVERTER not in job.config.model.converters:
        raise BadInput(
            f'[model] converters of {job.config_file} has no "{CONVERTER}": nothing to {purpose}'
        )


class BlockwiseFP8Converter:
    """Swaps `nn.Linear` and `GroupedExperts` modules for their blockwise FP8 counterparts.

    Runs on the meta model, before TorchTitan applies EP, activation checkpointing or compile.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        table = options_of(job_config)
        self._fqns = table.fqns
        self._config: dict[str, Any] = {
            "scale_format": table.scale_format,
            "wgrad": table.wgrad,
            "backend": choose_backend(torch.device(device_type), table.gemm),
        }

    def convert(self, model: nn.Module) -> None:
        """Convert in place; ValueError for a pattern in `fqns` that matches nothing."""
        modules = convertible_modules(model)
        chosen = select_fqns(modules, self._fqns)
        for fqn in chosen:
            model.set_submodule(fqn, _converted(modules[fqn], self._config))
        logger.info(f"Converted {len(chosen)} of {len(modules)} linear modules to blockwise FP8")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: weights are quantized and published by the optimizer step itself."""


def select_fqns(candidates: Iterable[str], patterns: list[str]) -> list[str]:
    """The candidates that the patterns choose, in order; see `BlockwiseFP8.fqns`.

    Raises ValueError that names a pattern which matches no candidate.
    """
    candidates = [fqn for fqn in candidates if not _matches_any(fqn, NEVER)]
    chosen: set[str] = set()
    # TorchTitan parses an empty list on the command line as [""].
    for pattern in filter(None, patterns):
        removes = pattern.startswith("!")
        glob = pattern.removeprefix("!")
        globs = DEFAULT_PATTERNS if glob == DEFAULT else (glob,)
        matched = {fqn for fqn in candidates if _matches_any(fqn, globs)}
        if not matched:
            raise ValueError(
                f"[blockwise_fp8] fqns: {pattern!r} matches no module that can compute in FP8. "
                f"There are {', '.join(candidates[:12])}{', ...' if len(candidates) > 12 else ''}; "
                f"never converted: embeddings, norms, {', '.join(NEVER)}"
            )
        chosen = chosen - matched if removes else chosen | matched
    return [fqn for fqn in candidates if fqn in chosen]


def _matches_any(fqn: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(fqn, glob) for glob in globs)


def convertible_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of a model that have an FP8 counterpart, by FQN."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module) in (nn.Linear, GroupedExperts)
    }


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights that a convertible module would hold in FP8."""
    counterpart = (
        BlockwiseFP8Linear if isinstance(module, nn.Linear) else BlockwiseFP8GroupedExperts
    )
    return counterpart.fp8_weights


def _converted(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    if isinstance(module, nn.Linear):
        return BlockwiseFP8Linear.from_linear(module, **config)
    return BlockwiseFP8GroupedExperts.from_experts(module, **config)
