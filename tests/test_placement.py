"""`BlockShard` inside DTensor: identity, redistributes, refusals, and ordinary ops on it."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_fp8zero import BlockShard

pytestmark = pytest.mark.multirank


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def from_local(local: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


def numbered(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element another integer: a unit in the wrong place shows."""
    return torch.arange(rows * torch.Size(shape).numel()).view(rows, *shape).to(dtype)


def my_rows(full: torch.Tensor) -> torch.Tensor:
    return full.chunk(dist.get_world_size())[dist.get_rank()].clone()


# Identity


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_copies_and_pickles_as_itself(duplicate):
    for placement in (BlockShard(), [BlockShard(), Replicate()][0]):
        twin = duplicate(placement)
        assert type(twin) is BlockShard
        assert twin.dim == 0
        assert twin == placement
        assert hash(twin) == hash(placement)


def test_equals_shard_0_with_another_hash():
    assert BlockShard() == Shard(0)
    assert Shard(0) == BlockShard()
    assert (BlockShard() != Shard(0)) is False
    assert hash(BlockShard()) != hash(Shard(0))
    assert hash((BlockShard(),)) != hash((Shard(0),))
    for other in (Shard(1), Replicate(), Partial(), _StridedShard(0, split_factor=2), 0, None):
        assert BlockShard() != other
        assert other != BlockShard()


def test_is_a_shard_of_dim_0_only():
    assert BlockShard().is_shard()
    assert BlockShard().is_shard(0)
    assert not BlockShard().is_shard(1)
    with pytest.raises(ValueError, match="dim=1"):
        BlockShard(1)


def test_repr_names_it():
    assert repr(BlockShard()) == "BlockShard()"
    assert str(BlockShard()) != str(Shard(0))


# Redistributes


def check_redistributes() -> None:
    mesh, n, rank = world_mesh(), dist.get_world_size(), dist.get_rank()
    full = numbered(2 * n, 3, 5)
    for dtype in (torch.float32, torch.bfloat16):
        expected = (full * sum(range(1, n + 1))).to(dtype)
        partial = from_local((full * (rank + 1)).to(dtype), mesh, Partial("sum"))
        summed = partial.redistribute(placements=[BlockShard()])
        assert isinstance(summed.placements[0], BlockShard)
        assert torch.equal(summed.to_local(), my_rows(expected))
        assert torch.equal(summed.full_tensor(), expected)
    averaged = from_local(full * (rank + 1), mesh, Partial("avg")).redistribute(
        placements=[BlockShard()]
    )
    torch.testing.assert_close(averaged.to_local(), my_rows(full * (n + 1) / 2))
    sharded = from_local(full.clone(), mesh, Replicate()).redistribute(placements=[BlockShard()])
    assert isinstance(sharded.placements[0], BlockShard)
    assert torch.equal(sharded.to_local(), my_rows(full))
    asynchronous = sharded.redistribute(placements=[Replicate()], async_op=True)
    assert torch.equal(wait_tensor(asynchronous.to_local()), full)
    back = sharded.redistribute(placements=[Replicate()])
    assert torch.equal(back.to_local(), full)
    assert torch.equal(back.redistribute(placements=[BlockShard()]).to_local(), my_rows(full))
    from_plain = from_local(my_rows(full), mesh, Shard(0)).redistribute(placements=[BlockShard()])
    assert torch.equal(from_plain.full_tensor(), full)
    assert torch.equal(sharded.redistribute(placements=[Shard(0)]).full_tensor(), full)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_redistributes(num_ranks):
    run_ranks(check_redistributes, num_ranks)


def check_one_byte_data() -> None:
    mesh, n = world_mesh(), dist.get_world_size()
    codes = torch.arange(2 * n * 64, dtype=torch.uint8).view(2 * n, 64)
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
        local = my_rows(codes).view(dtype)
        for gathered in (
            from_local(local, mesh, BlockShard()).full_tensor(),
            from_local(local, mesh, BlockShard()).redistribute(placements=[Replicate()]).to_local(),
        ):
            assert gathered.dtype == dtype
            assert torch.equal(gathered.view(torch.uint8), codes)
        asynchronous = from_local(local, mesh, BlockShard()).redistribute(
            placements=[Replicate()], async_op=True
        )
        assert torch.equal(wait_tensor(asynchronous.to_local()).view(torch.uint8), codes)
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        partial = from_local(torch.zeros(2 * n, 8, dtype=dtype), mesh, Partial("sum"))
        with pytest.raises(TypeError, match=str(dtype)):
            partial.redistribute(placements=[BlockShard()])


def test_one_byte_data_travels_but_is_never_reduced():
    run_ranks(check_one_byte_data, 2)


def check_refusals() -> None:
    mesh = world_mesh()
    odd = torch.zeros(5, 4)
    # Plain Shard(0) first: were hash and equality its own, its cached redistribute would run below.
    assert from_local(odd, mesh, Replicate()).redistribute(placements=[Shard(0)]).shape == (5, 4)
    assert from_local(odd, mesh, Partial()).redistribute(placements=[Shard(0)]).shape == (5, 4)
    for source in (Replicate(), Partial("sum"), Partial("avg")):
        with pytest.raises(ValueError, match=r"dim 0 \(5\).*mesh size \(2\)"):
            from_local(odd, mesh, source).redistribute(placements=[BlockShard()])
    uneven = DTensor.from_local(
        odd[: 3 - dist.get_rank()],
        mesh,
        [BlockShard()],
        run_check=False,
        shape=odd.shape,
        stride=odd.stride(),
    )
    with pytest.raises(ValueError, match=r"dim 0 \(5\)"):
        uneven.redistribute(placements=[Replicate()])
    even = from_local(torch.zeros(2, 4), mesh, BlockShard())
    with pytest.raises(NotImplementedError, match="Replicate"):
        even.redistribute(placements=[Shard(1)])
    even.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(1)])


def test_refusals():
    run_ranks(check_refusals, 2)


def check_two_hops() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full, rank = numbered(4, 6), dist.get_rank()
    partial = from_local(full * (rank + 1), mesh, Partial(), Partial())
    inside = partial.redistribute(placements=[Partial(), BlockShard()])
    row, column = mesh.get_coordinate()
    half = full.chunk(2)[column]
    assert torch.equal(inside.to_local(), half * (4 * row + 3))  # ranks 2 row and 2 row + 1
    reduced = inside.redistribute(placements=[Replicate(), BlockShard()])
    assert torch.equal(reduced.to_local(), half * 10)
    assert torch.equal(reduced.full_tensor(), full * 10)
    assert isinstance(reduced.placements[1], BlockShard)


def test_two_hops_of_a_two_dimensional_mesh():
    run_ranks(check_two_hops, 4)


# Ordinary ops


def check_relabelled_results() -> None:
    """DTensor may call a result Shard(0); the numbers must be right whatever the label."""
    mesh, n = world_mesh(), dist.get_world_size()
    full = numbered(2 * n, 8, 8) + 1
    tiles = from_local(my_rows(full), mesh, BlockShard())
    for op in (
        lambda t: t * 1.0,
        lambda t: t.clone(),
        lambda t: t.detach() + t,
        lambda t: t.sqrt().bfloat16(),
        lambda t: t.abs().amax(dim=(1, 2)),
        lambda t: torch.where(t > 9, t, 0.0),
    ):
        result = op(tiles)
        assert torch.equal(result.full_tensor(), op(full))
        again = result.redistribute(placements=[BlockShard()])
        assert torch.equal(again.to_local(), my_rows(op(full)))
        assert torch.equal((again * 2).full_tensor(), op(full) * 2)
    assert torch.equal(torch.zeros_like(tiles).to_local(), torch.zeros(2, 8, 8))
    twin = copy.deepcopy(torch.nn.Parameter(tiles))
    assert isinstance(twin.placements[0], BlockShard)
    assert torch.equal(twin.full_tensor(), full)
    pickled = pickle.loads(pickle.dumps(tiles.placements))
    assert isinstance(pickled[0], BlockShard)


def test_ordinary_ops_stay_right():
    run_ranks(check_relabelled_results, 3)


def check_optimizers_and_clipping() -> None:
    mesh, n = world_mesh(), dist.get_world_size()
    makers = {
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
        "loop": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    }
    for name, make in makers.items():
        torch.manual_seed(1)
        full = [torch.randn(2 * n, 8, 8), torch.randn(n, 8, 8)]
        plain = [torch.nn.Parameter(t.clone()) for t in full]
        tiles = [torch.nn.Parameter(from_local(my_rows(t), mesh, BlockShard())) for t in full]
        optimizers = [make(plain), make(tiles)]
        for _ in range(3):
            for p, t in zip(plain, tiles, strict=True):
                gradient = torch.randn_like(p) * 3
                p.grad = gradient
                t.grad = from_local(my_rows(gradient), mesh, BlockShard())
            norms = [torch.nn.utils.clip_grad_norm_(ps, 1.0, foreach=True) for ps in (plain, tiles)]
            torch.testing.assert_close(norms[1].full_tensor(), norms[0], rtol=1e-6, atol=0)
            for p, t in zip(plain, tiles, strict=True):
                torch.testing.assert_close(t.grad.full_tensor(), p.grad, rtol=1e-6, atol=0)
                t.grad = from_local(my_rows(p.grad), mesh, BlockShard())  # the same to the bit
            for optimizer in optimizers:
                optimizer.step()
        for p, t in zip(plain, tiles, strict=True):
            assert torch.equal(t.full_tensor(), p), name
            assert isinstance(t.placements[0], BlockShard)
            state = optimizers[1].state[t]
            for key, expected in optimizers[0].state[p].items():
                actual = state[key]
                actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
                assert torch.equal(actual, expected), (name, key)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_optimizers_and_clipping(num_ranks):
    run_ranks(check_optimizers_and_clipping, num_ranks)
