import subprocess
import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torchtitan.models.llama3.infra.parallelize as llama3
import torchtitan.models.llama4.infra.parallelize as llama4
import torchtitan.models.moe.kernels as kernels
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchtitan.components.checkpoint import CheckpointManager

import torchtitan_patches
from torchtitan_patches import checkpoint_manager, guard

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter: patches change the one they are applied in."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_each_patch_has_a_reason_and_an_apply():
    modules = {path.stem for path in (ROOT / "torchtitan_patches").glob("*.py")}
    assert modules - {"__init__", "guard"} == set(torchtitan_patches.PATCHES)
    for name in torchtitan_patches.PATCHES:
        module = __import__(f"torchtitan_patches.{name}", fromlist=["apply"])
        assert name == module.NAME and callable(module.apply) and len(module.__doc__) > 80


def test_unknown_patch_is_refused_before_any_is_applied():
    histc = torch.histc
    with pytest.raises(ValueError, match="no such patch: nonsense; there are: cpu_device"):
        torchtitan_patches.apply(["cpu_histc", "nonsense"])
    assert torch.histc is histc


@pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without a GPU")
def test_cpu_patches_apply_twice_and_are_named_in_the_log():
    out = run_python(
        """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torchtitan_patches as patches
patches.apply(patches.CPU_PATCHES)
patches.apply(patches.CPU_PATCHES)

import torch
from torchtitan.components.metrics import DeviceMemoryMonitor, device_module
from torchtitan.tools import utils
assert (utils.device_type, device_module.current_device()) == ("cpu", 0)
assert torch._utils._get_available_device_type() is None, "torch's own function is back"
stats = DeviceMemoryMonitor("cpu").get_peak_stats()
assert 0 < stats.max_reserved_gib and 0 < stats.max_reserved_pct < 100

counts = torch.histc(torch.tensor([0, 2, 2, 3]), bins=4, min=0, max=4)
assert counts.tolist() == [1, 0, 2, 1] and counts.dtype == torch.int64
assert torch.histc(torch.tensor([0.5]), bins=1, min=0, max=1).dtype == torch.float32
"""
    )
    for name in torchtitan_patches.CPU_PATCHES:
        assert out.count(f"applied patch {name}:") == 1


@pytest.fixture
def kept(monkeypatch):
    """Puts back what a patch applied in this process replaces."""

    def keep(*modules, name):
        for module in modules:
            monkeypatch.setattr(module, name, getattr(module, name))

    return keep


def test_cpu_permute_sorts_tokens_by_expert_and_compiles(kept):
    kept(kernels, name="fill_indices_wrapper")
    torchtitan_patches.apply(["cpu_permute"])
    # 2 ranks send tokens to 2 local experts: rank 0 sends 1 and 2, rank 1 sends 3 and 0.
    tokens = torch.tensor([1, 2, 3, 0])
    eager = kernels.generate_permute_indices
    for run in (eager, torch.compile(eager, fullgraph=True, backend="aot_eager")):
        indices, sizes, _ = run(tokens, 2, 2, 16, 8)
        assert sizes.tolist() == [8, 8]
        assert indices.tolist() == [0, 3, 4, 5, -1, -1, -1, -1, 1, 2, -1, -1, -1, -1, -1, -1]


@pytest.fixture
def one_gloo_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_gloo_sum_reaches_every_fsdp_module(kept, one_gloo_rank, monkeypatch):
    kept(llama3, llama4, name="disable_fsdp_gradient_division")
    torchtitan_patches.apply(["gloo_sum"])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    fully_shard(model[0], mesh=one_gloo_rank)
    fully_shard(model, mesh=one_gloo_rank)
    set_by: dict[str, list[tuple[Any, ...]]] = {}
    for setter in ("set_force_sum_reduction_for_comms", "set_gradient_divide_factor"):
        calls = set_by[setter] = []
        monkeypatch.setattr(FSDPModule, setter, lambda *args, calls=calls: calls.append(args))
    for module in (llama3, llama4):
        module.disable_fsdp_gradient_division(model)
        for setter, value in zip(set_by, (True, 1.0), strict=True):
            assert set(set_by[setter]) == {(model, value), (model[0], value)}
            set_by[setter].clear()


def test_gloo_thread_is_one_for_a_group_and_all_its_interfaces(kept, one_gloo_rank, monkeypatch):
    kept(c10d.ProcessGroupGloo, name="__init__")
    torchtitan_patches.apply(["gloo_thread"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    group = dist.new_group([0], timeout=timedelta(seconds=7))
    options = group._get_backend(torch.device("cpu")).options
    assert (options._threads, len(options._devices)) == (1, 2)
    assert options._timeout == timedelta(seconds=7)
    c10d._set_pg_timeout(timedelta(seconds=8), group)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=8)


def gloo_threads() -> list[int]:
    """Of each process group of a rank."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [dist.group.WORLD, *mesh.get_all_groups()]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


def test_ranks_have_one_gloo_thread_a_group():
    assert run_ranks(gloo_threads, 4) == [[1, 1, 1]] * 4


def test_cpu_device_refuses_after_torchtitan_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchtitan.tools.utils")
    with pytest.raises(RuntimeError, match=r"cpu_device refuses.*is imported already"):
        torchtitan_patches.apply(["cpu_device"])


@pytest.mark.parametrize("package", ["torch", "torchtitan"])
def test_refuses_a_version_it_was_not_written_for(monkeypatch, package):
    monkeypatch.setattr(
        guard, "version", lambda name: "9.1.0" if name == package else version(name)
    )
    with pytest.raises(RuntimeError, match=f"some_patch refuses.*{package} >=.*9.1.0 is installed"):
        guard.check_versions("some_patch")


def test_refuses_a_missing_or_changed_function():
    class Owner:
        def moved(self, a, b):
            return a, b

    assert guard.check_callable("p", Owner, "moved", ("self", "a", "b")) is Owner.moved
    with pytest.raises(RuntimeError, match=r"p refuses.*Owner\.moved takes .* instead of"):
        guard.check_callable("p", Owner, "moved", ("self", "a"))
    with pytest.raises(RuntimeError, match=r"Owner\.gone is gone.*revise the patch"):
        guard.check_callable("p", Owner, "gone", ())


def test_histc_patch_refuses_where_torch_counts_integers_itself(monkeypatch):
    from torchtitan_patches import cpu_histc

    monkeypatch.setattr(torch, "histc", lambda *args, **kwargs: torch.zeros(2))
    with pytest.raises(RuntimeError, match="by itself now"):
        cpu_histc.apply()


@pytest.mark.parametrize("name", checkpoint_manager.OVERRIDDEN)
def test_checkpoint_manager_refuses_where_what_it_overrides_has_changed(monkeypatch, name):
    monkeypatch.setattr(CheckpointManager, "__new__", object.__new__)
    monkeypatch.setattr(CheckpointManager, name, lambda self, other: None)
    with pytest.raises(RuntimeError, match=rf"checkpoint_manager refuses.*{name} takes"):
        checkpoint_manager.apply()
