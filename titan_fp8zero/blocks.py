"""Blockwise FP8 numerics in plain PyTorch: the definition that every kernel must equal to the bit.

A weight `[R, C]` or `[E, R, C]` is a grid of 128x128 blocks. Edge blocks are zero-padded. Folding
stores each block contiguously as a tile, so that a rank that owns whole tiles can quantize them
alone. The formats are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3): e4m3 codes, one fp32
`scale_inv` a 128x128 block for weights and one per 1x128 group for activations.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F

BLOCK = 128
TILE_NUMEL = BLOCK * BLOCK
E4M3_MAX = 448.0
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny  # 2^-126: a smaller scale loses its mantissa

ScaleFormat = Literal["fp32", "ue8m0"]
SCALE_FORMATS = ("fp32", "ue8m0")


def block_grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Blocks of a `[R, C]` or `[E, R, C]` weight as (experts, block rows, block columns).

    Raises ValueError for any other number of dimensions.
    """
    if len(shape) not in (2, 3):
        raise ValueError(
            f"blocks cover the last two dims of a 2-D or 3-D weight, got {tuple(shape)}"
        )
    rows, cols = shape[-2:]
    return prod(shape[:-2]), -(-rows // BLOCK), -(-cols // BLOCK)


def num_tiles(shape: tuple[int, ...]) -> int:
    """How many tiles a weight of this shape folds into."""
    return prod(block_grid(shape))


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the `scale_inv` of a weight: `[ceil(R/128), ceil(C/128)]`, experts in front."""
    _, block_rows, block_cols = block_grid(shape)
    return (*shape[:-2], block_rows, block_cols)


def fold(weight: torch.Tensor) -> torch.Tensor:
    """`[R, C]` or `[E, R, C]` -> tiles `[T, 128, 128]` in (expert, block row, block column) order.

    Edge blocks are padded with zeros. Any dtype; always a new tensor.
    """
    experts, block_rows, block_cols = block_grid(tuple(weight.shape))
    rows, cols = weight.shape[-2:]
    padding = (0, block_cols * BLOCK - cols, 0, block_rows * BLOCK - rows)
    # F.pad has no float8 kernel: pad the bytes.
    is_byte = weight.element_size() == 1
    padded = F.pad(weight.view(torch.uint8) if is_byte else weight, padding)
    tiles = (
        padded.reshape(experts, block_rows, BLOCK, block_cols, BLOCK)
        .transpose(2, 3)
        .reshape(-1, BLOCK, BLOCK)
    )
    return tiles.view(weight.dtype) if is_byte else tiles


def unfold(tiles: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Tiles `[T, 128, 128]` -> the weight of `shape`: the exact inverse of `fold`.

    Raises ValueError if T is not the number of tiles of `shape`.
    """
    experts, block_rows, block_cols = block_grid(tuple(shape))
    expected = (experts * block_rows * block_cols, BLOCK, BLOCK)
    if tuple(tiles.shape) != expected:
        raise ValueError(
            f"a weight of shape {tuple(shape)} has tiles {expected}, got {tuple(tiles.shape)}"
        )
    rows, cols = shape[-2:]
    padded = tiles.view(experts, block_rows, block_cols, BLOCK, BLOCK).transpose(2, 3)
    padded = padded.reshape(experts, block_rows * BLOCK, block_cols * BLOCK)
    return padded[:, :rows, :cols].reshape(shape).contiguous()


def fold_add(
    rank_tiles: torch.Tensor, gradient: torch.Tensor, start: int, is_first: bool = False
) -> None:
    """Fold a gradient `[R, C]` or `[E, R, C]` and add it, in place, to tiles shared out over ranks.

    `rank_tiles` `[ranks, units_per_rank, 128, 128]` holds units rank by rank; the gradient's first
    tile is unit `start`. Adds in fp32 and rounds once to the dtype of `rank_tiles`. What tiles hold
    before the first gradient counts as zeros.
    """
    tiles, units_per_rank = fold(gradient), rank_tiles.shape[1]
    first = 0
    while first < len(tiles):
        rank, unit = divmod(start + first, units_per_rank)
        count = min(units_per_rank - unit, len(tiles) - first)
        target = rank_tiles[rank, unit : unit + count]
        if is_first:
            target.zero_()
        target.add_(tiles[first : first + count])
        first += count


def unfold_tiles(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    units: torch.Tensor,
    weight_codes: Sequence[torch.Tensor],
    weight_scale_inv: Sequence[torch.Tensor],
    transposed: Sequence[torch.Tensor] = (),
) -> None:
    """Unfold codes e4m3 `[ranks, units_per_rank, 128, 128]`, with scale_inv fp32
    `[ranks, units_per_rank]`, into weights `[R, C]` or `[E, R, C]` and their scales, in place.

    `units` int64: which units, counted rank by rank, are the weights' tiles, in order and end to
    end. `transposed`, if not empty, takes the weights' codes with the last two dims swapped.
    """
    counts = [scale.numel() for scale in weight_scale_inv]
    data = codes.view(torch.uint8)  # float8 cannot be indexed everywhere
    for index, mine in enumerate(units.split(counts)):
        rank, unit = mine // codes.shape[1], mine % codes.shape[1]
        weight, scale = weight_codes[index], weight_scale_inv[index]
        weight.copy_(unfold(data[rank, unit], tuple(weight.shape)).view(weight.dtype))
        scale.copy_(scale_inv[rank, unit].view(scale.shape))
        if transposed:
            transposed[index].copy_(weight.transpose(-2, -1))


def scale_from_amax(amax: torch.Tensor, scale_format: ScaleFormat = "fp32") -> torch.Tensor:
    """`scale_inv` (fp32) of groups with these largest magnitudes (fp32).

    `amax / 448`, at least 2^-126; 1 for an all-zero group. "ue8m0" rounds up to a power of two.
    A non-finite amax gives a non-finite scale, so that a bad value stays visible.
    """
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"scale_format must be one of {SCALE_FORMATS}, got {scale_format!r}")
    # Division by a Python number is a multiplication by its reciprocal on CUDA; by a tensor it is
    # correctly rounded everywhere.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(min=SMALLEST_NORMAL)
    if scale_format == "ue8m0":
        exponent = (scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF
        scale = torch.where(scale.isfinite(), exponent.view(torch.float32), scale)
    return torch.where(amax == 0, 1.0, scale)


def to_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    """Round-to-nearest-even to e4m3, saturated at 448; NaN stays NaN."""
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_tiles(
    tiles: torch.Tensor, scale_format: ScaleFormat = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 tiles `[T, 128, 128]` -> (codes e4m3 `[T, 128, 128]`, scale_inv fp32 `[T]`)."""
    scale = scale_from_amax(tiles.abs().amax(dim=(1, 2)), scale_format)
    return to_e4m3(tiles / scale[:, None, None]), scale


def update_tiles(
    main: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    hyperparameters: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """AdamW (arXiv:1711.05101) on tiles `[T, 128, 128]`, in place, computed in fp32.

    `hyperparameters` fp32 `[T, 4]`, of each tile: `1 - lr * weight_decay`,
    `lr / (1 - beta1^step)`, `1 / sqrt(1 - beta2^step)`, and what its gradient is multiplied by.
    `main` is fp32; moments of another dtype are rounded to it last.
    """
    decay, step_size, correction, clip_factor = hyperparameters[:, :, None, None].unbind(1)
    beta1, beta2 = betas
    g = gradient.float() * clip_factor
    m = exp_avg.float().lerp(g, 1 - beta1)
    v = exp_avg_sq.float() * beta2 + g * g * (1 - beta2)
    main.mul_(decay).sub_(step_size * m / (v.sqrt() * correction + eps))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def quantize_blockwise(
    weight: torch.Tensor, scale_format: ScaleFormat = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight `[R, C]` or `[E, R, C]` with one scale a 128x128 block.

    Returns (codes float8_e4m3fn of the weight's shape, scale_inv fp32
    `[..., ceil(R/128), ceil(C/128)]`), the layout of DeepSeek-V3 checkpoints.
    """
    shape = tuple(weight.shape)
    codes, scale = quantize_tiles(fold(weight.float()), scale_format)
    return unfold(codes, shape), scale.view(scale_shape(shape))


def quantize_main(
    values: torch.Tensor, scale_format: ScaleFormat = "fp32", round_to_bf16: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize fp32 main values as training does; see `quantize_blockwise`."""
    return quantize_blockwise(values.bfloat16() if round_to_bf16 else values, scale_format)


def expand_scale(scale_inv: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Block scales `[..., ceil(R/128), ceil(C/128)]` -> one scale an element, of `shape`."""
    rows, cols = shape[-2:]
    expanded = scale_inv.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return expanded[..., :rows, :cols]


def dequantize_blockwise(
    codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """codes e4m3 `[R, C]` or `[E, R, C]` times their block's scale, computed in fp32, as `dtype`.

    Raises ValueError if `scale_inv` has not one scale a block.
    """
    shape = tuple(codes.shape)
    if tuple(scale_inv.shape) != scale_shape(shape):
        raise ValueError(
            f"codes {shape} need scale_inv {scale_shape(shape)}, got {tuple(scale_inv.shape)}"
        )
    return (codes.float() * expand_scale(scale_inv, shape)).to(dtype)


def quantize_rows(
    x: torch.Tensor, scale_format: ScaleFormat = "fp32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations `[M, K]` with one scale per 1x128 group of the last dim.

    Returns (codes e4m3 `[M, K]`, scale_inv fp32 `[M, ceil(K/128)]`); the last group may be short.
    Values are multiplied by the rounded reciprocal of the scale, as in DeepGEMM: a division each
    would take a kernel longer than its memory.
    """
    rows, cols = x.shape
    groups = -(-cols // BLOCK)
    padded = F.pad(x.float(), (0, groups * BLOCK - cols)).view(rows, groups, BLOCK)
    scale = scale_from_amax(padded.abs().amax(dim=-1), scale_format)
    codes = to_e4m3(padded * scale.reciprocal()[:, :, None]).view(rows, groups * BLOCK)
    return codes[:, :cols].contiguous(), scale


def dequantize_rows(
    codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Inverse of `quantize_rows` up to rounding: `[M, K]` of `dtype`, computed in fp32."""
    expanded = scale_inv.repeat_interleave(BLOCK, -1)[:, : codes.shape[1]]
    return (codes.float() * expanded).to(dtype)
