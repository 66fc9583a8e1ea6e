"""`torch.compile` of each block around `shard_zero1`, as TorchTitan does it, with inductor."""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn as nn
from models import Stack, assert_same, compute_weights, everything, shard
from ranks import run_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh

from titan_fp8zero import BlockwiseAdamW, BlockwiseFP8Linear, shard_zero1
from titan_fp8zero.zero1 import main_of

DTYPES = (torch.float32, torch.bfloat16)
LAYERS = 12


@pytest.fixture(autouse=True)
def fresh_dynamo(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_blocks(model: Stack) -> CompileCounterWithBackend:
    """Each block on its own and whole, as TorchTitan; counts graphs."""
    counter = CompileCounterWithBackend("inductor")
    for name, layer in model.layers.named_children():
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        model.layers.register_module(name, compiled)
    return counter


def train(
    model: Stack, mesh: Any, dtype: torch.dtype, steps: int = 4, compiled: bool = False
) -> tuple[list[torch.Tensor], CompileCounterWithBackend | None, dict[str, torch.Tensor]]:
    """Losses; also after step 2 a recompile is an error."""
    counter = compile_blocks(model) if compiled else None
    zero1 = shard_zero1(model, mesh, compute_dtype=dtype)
    optimizer = BlockwiseAdamW(model.parameters(), lr=1e-3, fused=True)
    zero1.attach(optimizer)
    losses = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(steps):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            x = torch.randn(16, 128, generator=torch.Generator().manual_seed(10 * step + rank))
            target = x.flip(-1)[:, :8]
            loss = (model(x.to(dtype)).float() - target).square().mean()
            loss.backward()
        zero1.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, counter, compute_weights(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_train_as_eager_in_one_graph(dtype):
    eager, _, _ = train(Stack(LAYERS), None, dtype)
    compiled, counter, _ = train(Stack(LAYERS), None, dtype, compiled=True)
    assert counter.frame_count == 1  # 12 layers share it, and publishing does not invalidate it
    assert len({loss.item() for loss in eager}) == len(eager)  # it does train
    eager, compiled = torch.stack(eager), torch.stack(compiled)
    if dtype == torch.float32:
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=0)
    else:  # inductor rounds to bf16 at other places, and training amplifies it
        torch.testing.assert_close(compiled[:2], eager[:2], rtol=1e-3, atol=0)
        torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=0)


def train_on_ranks() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    eager, _, _ = train(Stack(2), mesh, torch.float32, steps=3)
    compiled, counter, weights = train(Stack(2), mesh, torch.float32, steps=3, compiled=True)
    torch.testing.assert_close(torch.stack(compiled), torch.stack(eager), rtol=1e-5, atol=0)
    theirs: list[Any] = [weights]
    dist.broadcast_object_list(theirs)
    assert_same(weights, theirs[0])
    return counter.frame_count


@pytest.mark.multirank
def test_blocks_train_as_eager_on_two_ranks():
    assert run_ranks(train_on_ranks, 2, timeout=240) == [1, 1]


class Linears(nn.Module):
    """Nothing but our ops, which are opaque: compiled equals eager to the bit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = BlockwiseFP8Linear(128, 200, bias=False)
        self.second = BlockwiseFP8Linear(200, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def gradients(dtype: torch.dtype, compiled: bool) -> dict[str, torch.Tensor]:
    """Gradients of main parameters for losses of several magnitudes."""
    model = Linears()
    call = torch.compile(model, fullgraph=True) if compiled else model
    _, optimizer = shard(model, None, compute_dtype=dtype, gradient_dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(16, 128, generator=generator), torch.randn(16, 128, generator=generator)
    x = x.to(dtype)
    found = {}
    for magnitude in (1.0, 1e-4, 1e-8, 1e-20):
        optimizer.zero_grad()
        call(x).backward((dy * magnitude).to(dtype))
        for parameter in model.parameters():
            for member in main_of(parameter).layout.members:
                found[f"{member.weight.fqn} {magnitude}"] = parameter.grad.clone()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_gradients_are_those_of_eager(dtype):
    """An FP8 leaf would round them through e4m3: 1e-4 becomes 0, silently."""
    eager, compiled = gradients(dtype, compiled=False), gradients(dtype, compiled=True)
    for name, gradient in eager.items():
        magnitude = float(name.split()[1])
        assert magnitude / 1e3 < gradient.abs().max() < magnitude * 1e3
        assert gradient[gradient != 0].unique().numel() > 256  # e4m3 has no more
    assert_same(compiled, eager)


def test_compiling_after_sharding_reads_published_weights():
    """The other order: `shard_zero1` first; an update in place is seen without a recompile."""
    models = [Linears(), Linears()]
    outputs = []
    for model, compiled in zip(models, (False, True), strict=True):
        counter = CompileCounterWithBackend("inductor")
        _, optimizer = shard(model, None)
        call = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            output = call(x)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(output.detach())
        assert counter.frame_count == int(compiled)
    assert not torch.equal(outputs[0], outputs[2])
    for eager, compiled in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(eager, compiled)
    assert_same(everything(models[0]), everything(models[1]))
