"""TorchTitan's checkpoint manager over main parameters: which checkpoint, what is kept, what is
restored, what is refused. One process; killed saves are in `kill_saves.py`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.components.checkpoint as stock_manager
from managed_job import Job, Position
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import Checkpoint

import titan_fp8zero.titan.checkpoint_manager as checked_manager
from titan_fp8zero.checkpoint_errors import CheckpointError
from titan_fp8zero.checkpoint_files import (
    UNFINISHED,
    find_checkpoints,
    unfinished,
    verify_checkpoint,
)
from titan_fp8zero.sidecar import SIDECAR, read_sidecar
from titan_fp8zero.titan.checkpoint_manager import CheckedCheckpointManager


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def truncate(checkpoint: Path) -> Path:
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    return file


def saved(tmp_path: Path, steps: int, **checkpoint: object) -> Job:
    job = Job(tmp_path, **checkpoint)
    for _ in range(steps):
        job.save_next()
    job.manager.close()
    return job


def test_the_manager_is_ours_for_main_parameters_seeds_and_keys(tmp_path):
    assert type(Job(tmp_path).manager) is CheckedCheckpointManager
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    for ours, options in (
        (False, {"create_seed_checkpoint": False, "key_file": ""}),
        (True, {"create_seed_checkpoint": True, "key_file": ""}),
        (True, {"create_seed_checkpoint": False, "key_file": str(key)}),
    ):
        config = SimpleNamespace(
            **{**vars(Checkpoint()), **options, "enable_ft_dataloader_checkpoints": False}
        )
        manager = CheckpointManager(
            dataloader=None,
            model_parts=[],
            optimizers=SimpleNamespace(),
            lr_schedulers=None,
            states={},
            checkpoint_config=config,
            sd_adapter=None,
        )
        assert isinstance(manager, CheckedCheckpointManager) == ours


def test_the_latest_is_the_latest_complete_one_and_broken_ones_are_named(tmp_path, folder, caplog):
    saved(tmp_path, 3)
    file = truncate(folder / "step-3")
    assert Job(tmp_path).load() == 2
    assert f"{file} is damaged: it has" in caplog.text
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        Job(tmp_path).load(step=3)
    for step in (1, 2):
        truncate(folder / f"step-{step}")
    with pytest.raises(CheckpointError, match=r"(?s)broken checkpoints only.*step-1.*step-2"):
        Job(tmp_path).load()


def test_a_flipped_bit_in_the_latest_is_an_error_not_a_step_back(tmp_path, folder):
    saved(tmp_path, 2)
    file = folder / "step-2" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
    job = Job(tmp_path)
    before = [tensor.clone() for tensor in job.numbers()]
    with pytest.raises(CheckpointError, match=f"{file} is damaged: its SHA-256"):
        job.load()
    assert all(torch.equal(a, b) for a, b in zip(before, job.numbers(), strict=True))


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_purging_counts_complete_checkpoints_only(tmp_path, folder, async_mode):
    job = Job(tmp_path, keep_latest_k=2, async_mode=async_mode)
    for step in range(1, 7):
        job.save_next()
        job.manager._async_wait()
        if step in (1, 4, 5):
            truncate(folder / f"step-{step}")
    job.manager._purge_stale_checkpoints()
    job.manager.close()
    found = find_checkpoints(folder)
    assert found.complete.keys() == {3, 6} and found.broken.keys() == {4, 5}
    assert Job(tmp_path).load() == 6


def test_a_killed_first_save_leaves_the_initial_checkpoint_in_force(tmp_path, folder):
    saved(tmp_path / "initial", 3)
    saved(tmp_path, 1)
    (folder / UNFINISHED).mkdir()
    (folder / "step-1").rename(unfinished(folder / "step-1"))
    (unfinished(folder / "step-1") / SIDECAR).unlink()
    initial = str(tmp_path / "initial" / "checkpoint" / "step-3")
    job = Job(tmp_path, initial_load_path=initial, initial_load_model_only=False)
    assert job.load() == 3
    assert not folder.exists()


def test_a_job_that_only_loads_leaves_a_running_save_alone(tmp_path, folder):
    saved(tmp_path, 2)
    (folder / UNFINISHED).mkdir()
    (folder / "step-2").rename(unfinished(folder / "step-2"))
    assert Job(tmp_path, load_only=True).load() == 1
    assert unfinished(folder / "step-2").exists()
    assert Job(tmp_path).load() == 2


def test_stock_checkpoints_load_without_checksums(tmp_path, folder):
    job = saved(tmp_path, 2)
    dcp.save(job.manager._flattened_model_states_sd(), checkpoint_id=folder / "step-7")
    other = Job(tmp_path)
    other.optimizers.skipped_steps = 4
    assert other.load(step=7) == 2
    assert other.optimizers.skipped_steps == 0


def test_skipped_steps_go_on_counting_and_hide_no_balancing(tmp_path, folder):
    job = Job(tmp_path)
    job.optimizers.skipped_steps = 3
    job.save_next()
    assert read_sidecar(folder / "step-1").notes == {"skipped_steps": 3}
    resumed = Job(tmp_path)
    assert resumed.load() == 1 and resumed.optimizers.skipped_steps == 3
    bias = resumed.model.expert_bias

    def balance(*args):
        bias.add_(1)

    resumed.optimizers.register_step_pre_hook(balance)
    for factor, balanced, skipped in ((1.0, 1, 3), (float("nan"), 1, 4), (1.0, 2, 4)):
        resumed.optimizers.zero_grad()
        (resumed.model(torch.ones(2, 300)).sum() * factor).backward()
        resumed.optimizers.step()
        assert bias.tolist() == [balanced] * 4
        assert resumed.optimizers.skipped_steps == skipped


def test_an_asynchronous_save_that_fails_is_told_at_the_next_one_or_at_the_end(tmp_path, folder):
    job = Job(tmp_path, async_mode="async")
    job.save_next()
    job.manager._async_wait()
    before = [tensor.clone() for tensor in job.numbers()]
    (folder / UNFINISHED).touch()  # nothing can be written
    job.manager.save(2)
    with pytest.raises(CheckpointError, match=r"step-2 is not saved: rank 0: .*unfinished"):
        job.manager.save(3)
    job.manager.save(3)
    with pytest.raises(CheckpointError, match="step-3 is not saved"):
        job.manager.close()
    job.manager.close()  # told once
    assert all(torch.equal(a, b) for a, b in zip(before, job.numbers(), strict=True))
    (folder / UNFINISHED).unlink()
    assert Job(tmp_path).load() == 1


class EmptiedStager(DefaultStager):
    """As torch's own before 2.13, which no second save can use."""

    def _stage(self, *args: Any, **kwargs: Any) -> Any:
        staged = super()._stage(*args, **kwargs)
        self._state_dict_stager.close()
        return staged


@pytest.fixture
def saved_by_a_process(monkeypatch):
    """`[checkpoint] async_mode`, without the pinned memory that only GPUs have."""
    options = StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False)
    monkeypatch.setattr(stock_manager, "StagingOptions", lambda *pinned: options)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(_async_process_executor, "_CHECKPOINT_PROCESS", None)
    return {"async_mode": "async_with_pinned_mem"}


@pytest.mark.parametrize("is_reusable", [True, False])
def test_saves_by_another_process_follow_each_other(
    tmp_path, folder, monkeypatch, saved_by_a_process, is_reusable
):
    stager = DefaultStager if is_reusable else EmptiedStager
    monkeypatch.setattr(stock_manager, "DefaultStager", stager)
    monkeypatch.setattr(checked_manager, "_STAGER_IS_REUSABLE", is_reusable)
    job = saved(tmp_path, 3, **saved_by_a_process)
    assert (job.manager.stager is None) == (not is_reusable)
    assert sorted(find_checkpoints(folder).complete) == [1, 2, 3]
    assert Job(tmp_path).load() == 3


def test_the_end_of_the_process_that_saves_is_told(tmp_path, saved_by_a_process):
    job = Job(tmp_path, **saved_by_a_process)
    job.save_next()
    job.manager._async_wait()
    _async_process_executor._CHECKPOINT_PROCESS._save_process.kill()
    job.save_next()
    with pytest.raises(CheckpointError, match=r"step-2 is not saved: the process .* is gone"):
        job.manager.close()
    assert Job(tmp_path).load() == 1


def test_closing_waits_for_a_save_unless_an_error_is_on_its_way(tmp_path, folder, monkeypatch):
    job = Job(tmp_path, async_mode="async")
    job.save_next()
    job.manager.close()
    assert verify_checkpoint(folder / "step-1")
    never = torch.futures.Future()
    monkeypatch.setattr(job.manager, "save_future", never)
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            job.manager.close()
            raise


def test_a_manager_that_is_dropped_waits_for_no_rank(tmp_path, monkeypatch):
    job = Job(tmp_path)
    monkeypatch.setattr(job.manager, "_zero1s", None)  # iterated, by who waits
    with pytest.raises(TypeError):
        job.manager.close()
    job.manager.__del__()


def test_a_last_save_in_hugging_faces_format_is_told_by_name(tmp_path, folder):
    saved(tmp_path, 1)
    (folder / "step-2").mkdir()
    (folder / "step-2" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-2 holds Hugging Face.*initial_load_in_hf"):
        Job(tmp_path).load()
    assert Job(tmp_path).manager.load(step=1)


def test_another_vocabulary_is_one_error_and_nothing_is_loaded(tmp_path, folder):
    saved(tmp_path, 1)
    job = Job(tmp_path, outputs=80)
    before = [tensor.clone() for tensor in job.numbers()]
    with pytest.raises(CheckpointError, match=r"step-1 cannot be loaded.*nothing was loaded") as e:
        job.load()
    for line in (
        "2.weight: shape (70, 400) in the checkpoint, (80, 400) here",
        "2.bias: shape (70,) in the checkpoint, (80,) here",
        "optimizer.state.2.weight.exp_avg: shape (70, 400) in the checkpoint, (80, 400) here",
        "optimizer.state.2.bias.exp_avg_sq: shape (70,) in the checkpoint, (80,) here",
    ):
        assert line in str(e.value)
    assert all(torch.equal(a, b) for a, b in zip(before, job.numbers(), strict=True))


def test_data_positions_of_other_ranks_are_refused_with_advice(tmp_path):
    saved(tmp_path, 1, dataloader=Position(dp_rank_0=b"a", dp_rank_1=b"b", world_size=2))
    alone = Position(dp_rank_0=b"x", world_size=1)
    with pytest.raises(CheckpointError, match=r"(?s)dp_rank_1: in the.*exclude_from_loading data"):
        Job(tmp_path, dataloader=alone).load()
    assert alone.values["dp_rank_0"] == b"x"
    assert Job(tmp_path, dataloader=alone, exclude_from_loading=["dataloader"]).load() == 1


def test_a_checkpoint_of_weights_alone_is_no_checkpoint_to_resume(tmp_path, folder):
    job = Job(tmp_path)
    job.manager.save(4, last_step=True)
    with pytest.raises(CheckpointError, match=r"(?s)initial_load_path.*load_step") as error:
        Job(tmp_path).load()
    told = [line.strip() for line in str(error.value).splitlines()]
    for state in ("optimizer", "lr_scheduler", "train_state"):  # a line each, not one an entry
        assert [line for line in told if line.startswith(state)] == [
            f"{state}: missing in the checkpoint"
        ]
    other = Job(tmp_path / "other", initial_load_path=str(folder / "step-4"))
    assert other.manager.load()
    assert all(torch.equal(a, b) for a, b in zip(job.numbers(), other.numbers(), strict=True))


@pytest.mark.parametrize("name", ["empty", "unfinished"])
def test_a_directory_without_a_checkpoint_is_told(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{tmp_path / name} holds no complete checkpoint"):
        Job(tmp_path / "job", initial_load_path=str(tmp_path / name)).load()


def test_a_key_of_the_config_signs_and_is_asked_for(tmp_path, folder):
    keys = [tmp_path / name for name in ("key", "other key")]
    for number, key in enumerate(keys):
        key.write_bytes(bytes([number]) * 32)
    saved(tmp_path, 1, key_file=str(keys[0]))
    assert Job(tmp_path, key_file=str(keys[0])).load() == 1
    with pytest.raises(CheckpointError, match="signed with another key"):
        Job(tmp_path, key_file=str(keys[1])).load()
    with pytest.raises(CheckpointError, match="no key"):
        Job(tmp_path, key_file=str(tmp_path / "no key"))
    hugging_face = Job(tmp_path, key_file=str(keys[0])).manager
    with pytest.raises(CheckpointError, match="not signed, as all Hugging Face"):
        hugging_face.dcp_load({}, "path", from_hf=True, from_quantized=False)
