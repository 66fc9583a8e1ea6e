"""The `[blockwise_fp8]` table of a TorchTitan TOML config, and a key of `[checkpoint]`.

Named by `[job] custom_config_module = "titan_fp8zero.titan.config"`: TorchTitan merges this
module's `JobConfig` into its own. TorchTitan reads the field types at run time, so they must not
be strings (no `from __future__ import annotations` here).
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin


@dataclass
class BlockwiseFP8:
    """Options of blockwise FP8 ZeRO-1, in force where `[model] converters` has "blockwise_fp8"."""

    fqns: list[str] = field(default_factory=lambda: ["default"])
    """Which modules compute in FP8, as glob patterns over module FQNs. "default" stands for
    attention, feed-forward and expert weights; a leading "!" removes; an empty list converts
    nothing, and every parameter is then high-precision. A pattern without a match is an error."""

    strategy: Literal["block", "param"] = "block"
    """How tiles are shared out over the data-parallel ranks: "block" cuts every weight at tiles,
    "param" gives whole parameters to ranks, largest first, and pads every rank to the fullest."""

    scale_format: Literal["fp32", "ue8m0"] = "fp32"
    """Scales as fp32 numbers, or rounded up to powers of two."""

    main_round: Literal["none", "bf16"] = "none"
    """Round main parameters to bf16 before quantizing them, as TransformerEngine does."""

    wgrad: Literal["bf16", "fp8"] = "bf16"
    """Weight-gradient GEMM: "bf16" is in the compute dtype, "fp8" quantizes both sides 1x128."""

    gemm: Literal["auto", "reference", "torch", "deep_gemm"] = "auto"
    """GEMM backend; "auto" takes the fastest that this device runs."""

    transposed_weight: Literal["on_demand", "cached"] = "on_demand"
    """Backward multiplies by transposed weights: "on_demand" transposes each when it is needed,
    "cached" keeps copies, a byte a parameter, written when weights are published. Same bits."""

    bucket_mib: int = 512
    """Largest gradient payload of one reduce-scatter, MiB."""

    padding_limit: float = 0.02
    """Small parameters are pooled where padding would pass this share of a bucket; inf: never."""

    overlap: bool = True
    """Hide all-gathers behind the next forward; false: the step waits for them. Same bits."""

    accumulation: Literal["full", "every_microbatch"] = "full"
    """Of gradients over micro-batches: "full" adds them up locally and reduces once a step,
    "every_microbatch" reduces each, and holds a buffer only for a few buckets."""

    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradient buffers."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of gradients on the wire."""

    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the optimizer's moments; bfloat16 needs [optimizer] name = "BlockwiseAdamW"."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the key: TorchTitan checks only the command line's types."""
        if isinstance(self.fqns, str) or not all(isinstance(fqn, str) for fqn in self.fqns):
            raise ValueError(f"[blockwise_fp8] fqns must be a list of strings, got {self.fqns!r}")
        for field_ in fields(self):
            choices, value = get_args(field_.type), getattr(self, field_.name)
            if get_origin(field_.type) is Literal and value not in choices:
                raise ValueError(
                    f"[blockwise_fp8] {field_.name} must be one of {choices}, got {value!r}"
                )
        if not isinstance(self.bucket_mib, int) or self.bucket_mib < 1:
            raise ValueError(
                f"[blockwise_fp8] bucket_mib must be a positive whole number, "
                f"got {self.bucket_mib!r}"
            )
        if not isinstance(self.padding_limit, int | float) or not self.padding_limit >= 0:
            raise ValueError(
                f"[blockwise_fp8] padding_limit must be a number, at least 0, "
                f"got {self.padding_limit!r}"
            )


@dataclass
class Checkpoint:
    """What `[checkpoint]` has besides TorchTitan's own keys."""

    key_file: str = ""
    """File with a secret key. Checkpoints are signed with it, and only those are loaded."""


@dataclass
class JobConfig:
    blockwise_fp8: BlockwiseFP8 = field(default_factory=BlockwiseFP8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def options_of(job_config: Any) -> BlockwiseFP8:
    """The `[blockwise_fp8]` table of TorchTitan's merged config.

    Raises ValueError where the config was not merged with this module's.
    """
    options = getattr(job_config, "blockwise_fp8", None)
    if options is None:
        raise ValueError(
            'the converter "blockwise_fp8" needs [job] custom_config_module = '
            '"titan_fp8zero.titan.config"'
        )
    return options
