"""`BlockwiseFP8GroupedExperts`: the experts of a mixture-of-experts layer in blockwise FP8."""

import types
from collections.abc import Callable
from typing import Any, Self

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from titan_fp8zero.blocks import ScaleFormat
from titan_fp8zero.compute_weight import FP8Weight
from titan_fp8zero.expert_tokens import pad_tokens, place_tokens, unpad_tokens
from titan_fp8zero.linear import (
    FP8Config,
    WgradPrecision,
    config_repr,
    multiply,
    quantize_activation,
    quantized,
    to_compute_dtype,
)


class BlockwiseFP8GroupedExperts(nn.Module):
    """SwiGLU experts, a drop-in for TorchTitan's `GroupedExperts`.

    `w1` and `w3` are `[E, hidden, dim]`, `w2` is `[E, dim, hidden]`; under expert parallelism
    DTensors whose local parts are multiplied. Precision, dtypes and binding of compute weights are
    those of `BlockwiseFP8Linear`, with each expert's 128-token groups starting at its first token.
    """

    fp8_weights = ("w1", "w2", "w3")
    init_weights: Callable[..., None]
    """That of the module converted from, so that a run in FP8 starts from the same bits."""

    def __init__(
        self,
        w1: nn.Parameter,
        w2: nn.Parameter,
        w3: nn.Parameter,
        *,
        scale_format: ScaleFormat = "fp32",
        wgrad: WgradPrecision = "bf16",
        backend: str = "auto",
    ) -> None:
        """Takes the parameters as they are; for the rest see `FP8Config`."""
        super().__init__()
        self.num_experts, self.hidden_dim, self.dim = w1.shape
        self.w1, self.w2, self.w3 = w1, w2, w3
        self.config = FP8Config(scale_format, wgrad, backend).checked()
        self._compute_weights: dict[str, FP8Weight] = {}

    @classmethod
    def from_experts(cls, experts: nn.Module, **config: Any) -> Self:
        """A module that shares `w1`, `w2`, `w3` of `experts`, and its way to initialize them."""
        converted = cls(*(getattr(experts, name) for name in cls.fp8_weights), **config)
        init_weights = getattr(type(experts), "init_weights", None)
        if init_weights is not None:
            converted.init_weights = types.MethodType(init_weights, converted)
        return converted.train(experts.training)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """x `[M, dim]` sorted by expert -> `[M, dim]`; zeros for rows beyond the experts' tokens.

        `num_tokens_per_expert` is an integer tensor `[E]`.
        """
        w1, w2, w3 = (self._compute_weight(name) for name in self.fp8_weights)
        tokens = place_tokens(num_tokens_per_expert, x.shape[0])
        padded = pad_tokens(to_compute_dtype(x), tokens)
        rows = quantize_activation(padded, self.config, (w1, w3), tokens.ends)
        gate = multiply(rows, w1, self.config, tokens.ends)
        up = multiply(rows, w3, self.config, tokens.ends)
        hidden = quantize_activation(F.silu(gate) * up, self.config, (w2,), tokens.ends)
        out = multiply(hidden, w2, self.config, tokens.ends)
        return unpad_tokens(out, tokens).type_as(x)

    def _compute_weight(self, name: str) -> FP8Weight:
        bound = self._compute_weights.get(name)
        return bound or quantized(getattr(self, name), self.config)

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts} experts, dim={self.dim}, hidden_dim={self.hidden_dim}"
        return f"{sizes}, {config_repr(self.config)}"
