"""Tokens sorted by expert, moved apart so that every expert's begin at a multiple of 128 rows.

Grouped operands must lie so (see `operands.py`). Positions are computed on the device: nothing
waits for it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_fp8zero.blocks import BLOCK


class ExpertTokens(NamedTuple):
    """Where tokens go."""

    ends: Tensor
    """int32 `[E]`: the row after each expert's last token."""
    row_of: Tensor
    """int64 `[M]`: the row of each token; `num_rows` for tokens that belong to no expert."""
    num_rows: int
    """Enough for M tokens, whichever experts get them."""


def place_tokens(num_tokens_per_expert: Tensor, num_tokens: int) -> ExpertTokens:
    """Rows for `num_tokens` tokens, of which experts have these counts `[E]`, end to end."""
    counts = num_tokens_per_expert.long()
    num_experts = counts.shape[0]
    blocks = (counts + (BLOCK - 1)) // BLOCK
    starts = (blocks.cumsum(0) - blocks) * BLOCK
    token_ends = counts.cumsum(0)
    token = torch.arange(num_tokens, device=counts.device)
    expert = torch.searchsorted(token_ends, token, right=True)
    its_own = expert.clamp(max=num_experts - 1)
    row = starts[its_own] + token - (token_ends - counts)[its_own]
    num_rows = (num_tokens // BLOCK + num_experts) * BLOCK
    return ExpertTokens(
        (starts + counts).int(), torch.where(expert < num_experts, row, num_rows), num_rows
    )


def pad_tokens(x: Tensor, tokens: ExpertTokens) -> Tensor:
    """x `[M, K]` -> `[num_rows, K]`, zeros between experts; differentiable."""
    padded: Tensor = _Pad.apply(x, tokens.row_of, tokens.num_rows)
    return padded


def unpad_tokens(padded: Tensor, tokens: ExpertTokens) -> Tensor:
    """The inverse of `pad_tokens`: `[M, K]`, zeros for tokens of no expert; differentiable."""
    x: Tensor = _Unpad.apply(padded, tokens.row_of, tokens.num_rows)
    return x


def _scatter(x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    with_spare = x.new_zeros((num_rows + 1, x.shape[1]))  # tokens of no expert all go to the last
    return with_spare.index_copy_(0, row_of, x)[:num_rows]


def _gather(padded: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    # Rows of no expert may hold anything, NaN too: they are replaced, not multiplied by zero.
    x = padded[row_of.clamp(max=num_rows - 1)]
    return torch.where((row_of < num_rows)[:, None], x, 0)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(row_of)
        ctx.num_rows = num_rows
        return _scatter(x, row_of, num_rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (row_of,) = ctx.saved_tensors
        return _gather(grad_outputs[0], row_of, ctx.num_rows), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(row_of)
        ctx.num_rows = num_rows
        return _gather(padded, row_of, num_rows)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (row_of,) = ctx.saved_tensors
        return _scatter(grad_outputs[0], row_of, ctx.num_rows), None, None
