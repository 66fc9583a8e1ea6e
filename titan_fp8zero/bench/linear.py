"""Forward and backward of whole linears, compiled: ours beside torch's and torchao's, in bf16."""

from collections.abc import Iterator

import torch
import torch.nn as nn
from torch import Tensor

from titan_fp8zero.bench.measure import gbytes, median_ms
from titan_fp8zero.bench.report import Row
from titan_fp8zero.compute_weight import gradient_carrier
from titan_fp8zero.linear import WGRAD_PRECISIONS, BlockwiseFP8Linear, quantized

BF16 = torch.bfloat16
STOCK = "linear, nn.Linear in bf16"


def linear_rows(
    tokens: int, outputs: int, inputs: int, device: torch.device, *, with_torchao: bool
) -> Iterator[Row]:
    """Quantization of x and dy is part of it; that of our weights is not, it is the optimizer's."""
    x = torch.randn(tokens, inputs, dtype=BF16, device=device, requires_grad=True)
    dy = torch.randn(tokens, outputs, dtype=BF16, device=device)

    def row(name: str, module: nn.Module, leaf: Tensor, peer: str = STOCK) -> Row:
        compiled = torch.compile(module)

        def run() -> tuple[Tensor, ...]:
            y = compiled(x)
            return y, *torch.autograd.grad(y, (x, leaf), dy)

        gflop = 6 * tokens * outputs * inputs / 1e9
        return Row(name, median_ms(run, device), gbytes(x, dy, *run()), gflop, peer)

    def stock() -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, device=device, dtype=BF16)

    linear = stock()
    yield row(STOCK, linear, linear.weight, peer="")
    for wgrad in WGRAD_PRECISIONS:
        fp8 = BlockwiseFP8Linear.from_linear(linear, wgrad=wgrad)
        yield row(f"linear, blockwise FP8, wgrad {wgrad}", fp8, _bind_compute_weight(fp8))
    for recipe in ("rowwise", "tensorwise") if with_torchao else ():
        module = _torchao(stock(), recipe)
        yield row(f"linear, torchao {recipe}", module, next(module.parameters()))


def _bind_compute_weight(linear: BlockwiseFP8Linear) -> Tensor:
    """As `shard_zero1` does; returns the gradient carrier."""
    carrier = gradient_carrier(tuple(linear.weight.shape), BF16, linear.weight.device)
    weight = quantized(linear.weight, linear.config)._replace(carrier=carrier)
    linear._compute_weights = {"weight": weight}
    return carrier


def _torchao(linear: nn.Linear, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(linear), config=config)
