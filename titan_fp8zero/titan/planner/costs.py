"""Bytes that a rank holds and sends for a bucket, and the time a step's communication and update
would take, for our scheme and for three that others use."""

from dataclasses import dataclass, fields
from typing import Literal, Self

import torch

from titan_fp8zero.blocks import TILE_NUMEL
from titan_fp8zero.bucket import ROW_ALIGNMENT, SCALE_BYTES, Precision, payload_row_bytes
from titan_fp8zero.layout import BucketLayout, Strategy
from titan_fp8zero.operands import round_up

FP32_BYTES, BF16_BYTES, FP8_BYTES = 4, 2, 1

Scheme = Literal["bf16", "megatron", "param", "block"]
SCHEMES: dict[Scheme, str] = {
    "bf16": "BF16 ZeRO-1",
    "megatron": "Megatron: FP8 gather, amaxes",
    "param": 'FP8, strategy "param"',
    "block": 'FP8, strategy "block"',
}


class _Sum:
    """Numbers that add up field by field."""

    def __add__(self, other: Self) -> Self:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return type(self)(*[getattr(self, name) + getattr(other, name) for name in names])


@dataclass(frozen=True)
class RankBytes(_Sum):
    """Bytes that each rank of a bucket holds for it."""

    codes: int = 0
    """Compute weights, FP8, and their transposed copies."""
    scale_inv: int = 0
    values: int = 0
    """High-precision compute weights."""
    gradient: int = 0
    """Its buffer `[ranks, columns]`, in which backward accumulates until it is reduced."""
    reduced_gradient: int = 0
    """The rank's share, fp32."""
    main: int = 0
    """Main parameters, fp32."""
    moments: int = 0
    """Adam's two."""
    payload: int = 0
    """What the rank publishes."""

    @property
    def compute(self) -> int:
        return self.codes + self.scale_inv + self.values

    @property
    def held(self) -> int:
        """All but the gradient buffer, which the bucket gives back when it is reduced."""
        return self.compute + self.reduced_gradient + self.main + self.moments + self.payload


def rank_bytes(
    layout: BucketLayout,
    precision: Precision,
    moment_dtype: torch.dtype,
    keep_transposed: bool,
) -> RankBytes:
    """What each rank holds for a bucket."""
    owned = _owned_numel(layout)
    is_fp8 = layout.is_fp8
    return RankBytes(
        codes=layout.real_numel * FP8_BYTES * (1 + keep_transposed) if is_fp8 else 0,
        scale_inv=layout.real_units * SCALE_BYTES if is_fp8 else 0,
        values=0 if is_fp8 else layout.real_numel * precision.compute.itemsize,
        gradient=_gradient_numel(layout) * precision.accumulate.itemsize,
        reduced_gradient=owned * FP32_BYTES,
        main=owned * FP32_BYTES,
        moments=2 * owned * moment_dtype.itemsize,
        payload=_payload_bytes(layout, precision),
    )


def _owned_numel(layout: BucketLayout) -> int:
    return layout.units_per_rank * (TILE_NUMEL if layout.is_fp8 else 1)


def _gradient_numel(layout: BucketLayout) -> int:
    flags = round_up(len(layout.members), ROW_ALIGNMENT)
    return layout.num_ranks * (_owned_numel(layout) + flags)


def _payload_bytes(layout: BucketLayout, precision: Precision) -> int:
    if layout.is_fp8:
        return payload_row_bytes(layout.units_per_rank)
    return layout.units_per_rank * precision.compute.itemsize


@dataclass(frozen=True)
class StepCost(_Sum):
    """What a step costs a rank beside forward and backward."""

    reduce: float = 0
    """Bytes sent to reduce gradients."""
    amax: float = 0
    """Bytes sent to agree on block amaxes."""
    gather: float = 0
    """Bytes sent to gather weights."""
    memory: float = 0
    """Bytes that update, quantization and unfolding read and write."""
    reduce_scatters: int = 0
    all_reduces: int = 0
    all_gathers: int = 0

    @property
    def sent(self) -> float:
        return self.reduce + self.amax + self.gather

    @property
    def collectives_by_kind(self) -> tuple[int, int, int]:
        """Reduce-scatters, all-reduces, all-gathers."""
        return self.reduce_scatters, self.all_reduces, self.all_gathers

    @property
    def collectives(self) -> int:
        return sum(self.collectives_by_kind)


@dataclass(frozen=True)
class Bandwidths:
    """Of one rank, GB/s (10^9 bytes a second)."""

    network: float
    """Sent; as much is received at the same time."""
    memory: float
    """Read and written together."""

    def communication_ms(self, cost: StepCost) -> float:
        return cost.sent / self.network / 1e6

    def update_ms(self, cost: StepCost) -> float:
        return cost.memory / self.memory / 1e6

    def step_ms(self, cost: StepCost) -> float:
        """One after the other, nothing overlapped."""
        return self.communication_ms(cost) + self.update_ms(cost)


def strategy_of(scheme: Scheme) -> Strategy:
    """Which layout a scheme's buckets are those of."""
    return "param" if scheme == "param" else "block"


def step_cost(
    scheme: Scheme,
    layout: BucketLayout,
    precision: Precision,
    *,
    replicas: int = 1,
    reductions: int = 1,
    moment_dtype: torch.dtype = torch.float32,
) -> StepCost:
    """A bucket's share of a step, on a rank.

    `replicas` is HSDP's replicate degree, `reductions` how often a step reduces gradients.

    Collectives are rings: of B bytes over n ranks a rank sends B (n-1)/n in a reduce-scatter or an
    all-gather, twice that in an all-reduce. "bf16" and "megatron" are reckoned on flat buckets of
    the same weights, without padding; the amax all-reduce is `amax_cost`.
    """
    if scheme in ("bf16", "megatron"):
        gradient = layout.real_numel * precision.reduce.itemsize
        gathered = layout.real_numel * _flat_weight_bytes(scheme, layout)
    else:
        gradient = _gradient_numel(layout) * precision.reduce.itemsize
        gathered = layout.num_ranks * _payload_bytes(layout, precision)
    is_sharded, is_replicated = layout.num_ranks > 1, replicas > 1
    shard = gradient / layout.num_ranks
    return StepCost(
        reduce=reductions * (_ring(gradient, layout.num_ranks) + 2 * _ring(shard, replicas)),
        gather=_ring(gathered, layout.num_ranks),
        memory=_memory_traffic(scheme, layout, precision, moment_dtype),
        reduce_scatters=reductions * is_sharded,
        all_reduces=reductions * is_replicated,
        all_gathers=int(is_sharded),
    )


def amax_cost(layouts: list[BucketLayout]) -> StepCost:
    """The one all-reduce(MAX) of every block's fp32 amax over the ranks of a mesh's FP8 buckets."""
    num_ranks = layouts[0].num_ranks
    blocks = sum(layout.real_units for layout in layouts)
    amax = 2 * _ring(blocks * FP32_BYTES, num_ranks)
    return StepCost(amax=amax, all_reduces=int(num_ranks > 1))


def _ring(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def _flat_weight_bytes(scheme: Scheme, layout: BucketLayout) -> int:
    return FP8_BYTES if scheme == "megatron" and layout.is_fp8 else BF16_BYTES


def _memory_traffic(
    scheme: Scheme, layout: BucketLayout, precision: Precision, moment_dtype: torch.dtype
) -> float:
    """Adam reads the gradient, and reads and writes main parameter and moments, in one pass that
    also writes the new weight. Megatron reads main parameters twice more, for amaxes and for codes.
    Where a bucket is no flat buffer, what was gathered is copied (unfolded) into the weights."""
    adam = FP32_BYTES + 2 * FP32_BYTES + 4 * moment_dtype.itemsize
    if scheme in ("bf16", "megatron"):
        passes = 2 * FP32_BYTES if scheme == "megatron" and layout.is_fp8 else 0
        owned = layout.real_numel / layout.num_ranks
        return owned * (adam + passes + _flat_weight_bytes(scheme, layout))
    gathered = layout.num_ranks * _payload_bytes(layout, precision)
    updated = _owned_numel(layout) * adam + _payload_bytes(layout, precision)
    return updated + 2 * gathered
