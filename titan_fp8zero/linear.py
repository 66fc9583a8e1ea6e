"""`BlockwiseFP8Linear`, and the differentiable FP8 product that it shares with the experts."""

from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_fp8zero import gemm
from titan_fp8zero.backends import BACKENDS
from titan_fp8zero.blocks import SCALE_FORMATS, ScaleFormat
from titan_fp8zero.compute_weight import FP8Weight
from titan_fp8zero.tensor_parallel import local_operand, product

WgradPrecision = Literal["bf16", "fp8"]
WGRAD_PRECISIONS = ("bf16", "fp8")
COMPUTE_DTYPES = (torch.bfloat16, torch.float32)


class FP8Config(NamedTuple):
    """How a module multiplies. Strings, so that torch.compile sees constants."""

    scale_format: ScaleFormat
    """"fp32", or "ue8m0": powers of two."""
    wgrad: WgradPrecision
    """"bf16": dy as it is times the dequantized x. "fp8": both in 1x128 groups along the tokens."""
    backend: str
    """See `backends.choose_backend`."""

    def checked(self) -> Self:
        """Itself; raises ValueError for a value that is none of the choices."""
        for name, choices in (
            ("scale_format", SCALE_FORMATS),
            ("wgrad", WGRAD_PRECISIONS),
            ("backend", BACKENDS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        return self


class BlockwiseFP8Linear(nn.Linear):
    """`nn.Linear` whose GEMMs take blockwise FP8 operands (DeepSeek-V3, arXiv:2412.19437, 3.3).

    Takes x `[..., in_features]` in bf16 or fp32 and computes in that dtype, under autocast in
    autocast's; any other raises TypeError. What is saved for backward is FP8. A non-finite value
    in x or dy comes out as NaN.

    Under tensor parallelism (ColwiseParallel, RowwiseParallel) x is a DTensor and so is the result;
    blocks are those of the local shard of the weight.

    The weight is quantized in every forward, until `shard_zero1` binds a compute weight to the
    module: then that is read instead, and the gradient arrives on its gradient carrier.
    """

    fp8_weights = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scale_format: ScaleFormat = "fp32",
        wgrad: WgradPrecision = "bf16",
        backend: str = "auto",
    ) -> None:
        """As `nn.Linear`; the rest is described at `FP8Config`, ValueError if it is no choice."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self.config = FP8Config(scale_format, wgrad, backend).checked()
        self._compute_weights: dict[str, Any] = {}

    @classmethod
    def from_linear(cls, linear: nn.Linear, **config: Any) -> Self:
        """A module that shares the parameters of `linear`, on any device, meta too."""
        converted = cls(
            linear.in_features, linear.out_features, bias=False, device="meta", **config
        )
        converted.weight = linear.weight
        converted.bias = linear.bias
        return converted.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        weight = self._compute_weights.get("weight") or quantized(self.weight, self.config)
        x = to_compute_dtype(input)
        if isinstance(x, DTensor):
            (placement,) = weight.placements
            local = self._multiply(local_operand(x, placement), weight)
            out: Tensor = product(local, x, placement)
        else:
            out = self._multiply(x, weight)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out

    def _multiply(self, x: Tensor, weight: FP8Weight) -> Tensor:
        rows = quantize_activation(x.reshape(-1, x.shape[-1]), self.config, (weight,))
        out = multiply(rows, weight, self.config)
        return out.view(*x.shape[:-1], out.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {config_repr(self.config)}"


def config_repr(config: FP8Config) -> str:
    """The config as `extra_repr` shows it."""
    return ", ".join(f"{name}={value}" for name, value in config._asdict().items())


def quantized(weight: Tensor, config: FP8Config) -> FP8Weight:
    """An unbound weight, or its local shard, quantized now; it is its own gradient carrier."""
    placements = weight.placements if isinstance(weight, DTensor) else ()
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    codes, scale_inv = gemm.quantize_weight(local.detach(), config.scale_format)
    return FP8Weight(codes, scale_inv, local, placements=placements)


def to_compute_dtype(x: Tensor) -> Tensor:
    """x in the dtype that autocast asks for, as `nn.Linear` would; TypeError for an unfit dtype."""
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    if x.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"blockwise FP8 computes in bfloat16 or float32, got x in {x.dtype}")
    return x


class FP8Activation(NamedTuple):
    """Activations, quantized once for all the weights they multiply."""

    x: Tensor
    """`[M, K]` in the compute dtype; only its gradient matters."""
    codes: Tensor
    """e4m3 `[M, K]`, in 1x128 groups along K: forward's operand."""
    scale_inv: Tensor
    """fp32 `[M, ceil(K/128)]`."""
    column_codes: Tensor | None
    """By `gemm.quantize_columns`: the operand of an "fp8" weight gradient, if there will be one."""
    column_scale_inv: Tensor | None


def quantize_activation(
    x: Tensor,
    config: FP8Config,
    weights: tuple[FP8Weight, ...],
    expert_ends: Tensor | None = None,
) -> FP8Activation:
    """Quantize x `[M, K]` for the products with `weights` and for their gradients."""
    data = x.detach()
    has_wgrad = torch.is_grad_enabled() and any(weight.carrier.requires_grad for weight in weights)
    if config.wgrad == "bf16" or not has_wgrad:
        codes, scale_inv = gemm.quantize_rows(data, config.scale_format)
        return FP8Activation(x, codes, scale_inv, None, None)
    quantized = gemm.quantize_rows_and_columns(data, config.scale_format, expert_ends)
    return FP8Activation(x, *quantized)


def multiply(
    activation: FP8Activation,
    weight: FP8Weight,
    config: FP8Config,
    expert_ends: Tensor | None = None,
) -> Tensor:
    """x `[M, K]` times a weight `[N, K]` transposed -> `[M, N]` in x's dtype, differentiable.

    Given `expert_ends`, the weight is `[E, N, K]`; see `operands.py`. The weight's gradient comes
    back on its carrier, in the carrier's dtype.
    """
    x, *operands = activation
    return _Multiply.apply(
        x,
        weight.carrier,
        *operands,
        weight.codes,
        weight.scale_inv,
        weight.transposed,
        expert_ends,
        config,
    )


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        carrier: Tensor,
        x_codes: Tensor,
        x_scale: Tensor,
        column_codes: Tensor | None,
        column_scale: Tensor | None,
        w_codes: Tensor,
        w_scale: Tensor,
        w_transposed: Tensor | None,
        expert_ends: Tensor | None,
        config: FP8Config,
    ) -> Tensor:
        wgrad_operand: tuple[Tensor | None, Tensor | None] = (column_codes, column_scale)
        if config.wgrad == "bf16" and ctx.needs_input_grad[1]:
            wgrad_operand = (x_codes, x_scale)
        ctx.save_for_backward(*wgrad_operand, w_codes, w_transposed, w_scale, expert_ends)
        ctx.x_dtype, ctx.carrier_dtype, ctx.config = x.dtype, carrier.dtype, config
        return gemm.fp8_gemm_nt(
            x_codes, x_scale, w_codes, w_scale, x.dtype, config.backend, expert_ends
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        x_codes, x_scale, w_codes, w_transposed, w_scale, expert_ends = ctx.saved_tensors
        scale_format, wgrad, backend = ctx.config
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        dx = dw = None
        dy_rows: tuple[Tensor, ...] = ()
        dy_columns: tuple[Tensor, ...] = ()
        if needs_dx and needs_dw and wgrad == "fp8":
            quantized = gemm.quantize_rows_and_columns(dy, scale_format, expert_ends)
            dy_rows, dy_columns = quantized[:2], quantized[2:]
        elif needs_dx:
            dy_rows = gemm.quantize_rows(dy, scale_format)
        elif wgrad == "fp8":
            dy_columns = gemm.quantize_columns(dy, scale_format, expert_ends)
        if needs_dx:
            dx = gemm.fp8_gemm_nt(
                *dy_rows,
                w_codes.transpose(-2, -1) if w_transposed is None else w_transposed,
                w_scale.transpose(-2, -1),
                ctx.x_dtype,
                backend,
                expert_ends,
            )
        if needs_dw and wgrad == "bf16":
            dw = gemm.bf16_wgrad_tn(dy, x_codes, x_scale, ctx.carrier_dtype, backend, expert_ends)
        elif needs_dw:
            dw = gemm.fp8_wgrad_nt(
                *dy_columns,
                x_codes,
                x_scale,
                ctx.carrier_dtype,
                backend,
                expert_ends,
            )
        return dx, dw, *[None] * 9
