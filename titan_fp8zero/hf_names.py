"""Hugging Face's names for a model's weights, learnt from the function that converts state dicts.

A weight `[R, C]` has one name there, but its rows may be in another order (Llama's rotary heads);
a weight `[E, R, C]` has a name for each expert. Both are read off an index of rows that is
converted in the weight's place, so that no architecture has to be known here.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch

from titan_fp8zero.blocks import BLOCK

ToHF = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts a state dict of plain tensors: TorchTitan's `StateDictAdapter.to_hf`, say."""

SCALE_SUFFIX = "_scale_inv"
"""Of the name of an FP8 weight's scales, as DeepSeek-V3 publishes and vLLM and SGLang load them."""


class Piece(NamedTuple):
    """What has a name of its own: a whole weight, or one expert of it."""

    name: str
    expert: int | None
    """Its index in dim 0 of `[E, R, C]`; None for a whole weight."""
    rows: torch.Tensor | None
    """int64 `[R]`: the weight's row at each row of the piece; None where the order is the same."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether rows stay in their 128-row block, so that codes and scales stay valid."""
        if self.rows is None:
            return True
        return torch.equal(self.rows // BLOCK, torch.arange(len(self.rows)) // BLOCK)

    def take(self, weight: torch.Tensor, first_expert: int = 0) -> torch.Tensor:
        """The piece of a weight, whose dim 0 starts at `first_expert`; a view if order is kept."""
        matrix = weight if self.expert is None else weight[self.expert - first_expert]
        if self.rows is None:
            return matrix
        rows = self.rows.to(matrix.device)
        if matrix.element_size() > 1:
            return matrix[rows]
        return matrix.view(torch.uint8)[rows].view(matrix.dtype)  # float8 cannot be indexed

    def take_scale(self, scale_inv: torch.Tensor, first_expert: int = 0) -> torch.Tensor:
        """The block scales of the piece, where it keeps blocks; a view."""
        return scale_inv if self.expert is None else scale_inv[self.expert - first_expert]

    def restore(self, matrix: torch.Tensor) -> torch.Tensor:
        """The rows of a piece in the order of the weight: the inverse of `take`."""
        return matrix if self.rows is None else matrix[self.rows.argsort()]


def pieces_of(fqn: str, shape: tuple[int, ...], to_hf: ToHF) -> list[Piece]:
    """The pieces of a weight of any shape, in `to_hf`'s order; none if it has no name there.

    Raises ValueError if `to_hf` does more to a weight than to split experts and order rows.
    """
    if len(shape) < 2:
        return [Piece(name, None, None) for name in to_hf({fqn: torch.empty(shape)})]
    # The number of each row, in place of its values.
    index = torch.arange(prod(shape[:-1]), dtype=torch.int32).view(*shape[:-1], 1).expand(shape)
    pieces = []
    for name, part in to_hf({fqn: index}).items():
        if part.shape == shape[-2:]:
            pieces.append(_piece(name, part[:, 0], is_expert=len(shape) == 3))
        elif part.shape == shape and torch.equal(part[..., 0], index[..., 0]):
            pieces.append(Piece(name, None, None))
        else:
            raise ValueError(f"{fqn} {shape} becomes {name} {tuple(part.shape)}: it is reshaped")
    return pieces


def _piece(name: str, numbers: torch.Tensor, *, is_expert: bool) -> Piece:
    """A piece `[R, C]` whose rows are those with these numbers."""
    in_order = torch.arange(len(numbers), dtype=numbers.dtype)
    expert = int(numbers[0]) // len(numbers)
    rows = numbers - expert * len(numbers)
    is_in_order = torch.equal(rows, in_order)
    if not is_in_order and not torch.equal(rows.sort().values, in_order):
        raise ValueError(f"{name} mixes rows of several experts")
    return Piece(name, expert if is_expert else None, None if is_in_order else rows.long())
