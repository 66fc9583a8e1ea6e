"""Checkpoints are complete or absent, checked before they are loaded, and refused by name."""

import ctypes
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GivenGradients, differing, everything, shard
from ranks import run_ranks

from titan_fp8zero.checkpoint import load_optimizer_state_dict, optimizer_state_dict
from titan_fp8zero.checkpoint_errors import CheckpointError, told_by_all
from titan_fp8zero.checkpoint_files import (
    CheckpointReader,
    CheckpointWriter,
    find_checkpoints,
    finish_interrupted,
    unfinished,
    verify_checkpoint,
    why_incomplete,
)
from titan_fp8zero.load_planner import StrictLoadPlanner
from titan_fp8zero.sidecar import MIN_KEY_BYTES, SIDECAR, read_key, read_sidecar

SHAPES = {"wide": (200, 300), "norm": (97,)}
KEY, OTHER_KEY = b"k" * MIN_KEY_BYTES, b"o" * MIN_KEY_BYTES


def state_of_a_model(shapes: dict[str, tuple[int, ...]] = SHAPES) -> tuple[Any, Any, dict]:
    model = GivenGradients(shapes)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    _, optimizer = shard(model, mesh)
    return (
        model,
        optimizer,
        {**model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)},
    )


def save(path: Path, key: bytes | None = None, notes: dict[str, Any] | None = None) -> None:
    _, _, state = state_of_a_model()
    dcp.save(state, storage_writer=CheckpointWriter(path, notes, key))


def told(action: Any, *args: Any, **options: Any) -> str:
    """The message of the CheckpointError that `action` must raise."""
    try:
        action(*args, **options)
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")


# Damage.

DAMAGES = ("flipped", "truncated", "missing", "flipped metadata", "changed sidecar", "no metadata")


def damage(checkpoint: Path, kind: str) -> str:
    """Returns what the error must name."""
    data, metadata, sidecar = (checkpoint / n for n in ("__1_0.distcp", ".metadata", SIDECAR))
    file = metadata if "metadata" in kind else sidecar if "sidecar" in kind else data
    content = bytearray(file.read_bytes())
    if kind in ("missing", "no metadata"):
        file.unlink()
        return file.name
    if kind == "truncated":
        file.write_bytes(content[:-1])
    elif kind == "changed sidecar":
        file.write_bytes(content.replace(b'"skipped": 3', b'"skipped": 4'))
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return str(file)


def save_and_damage(folder: str) -> dict[str, Any]:
    whole = Path(folder, "step-1")
    save(whole, notes={"skipped": 3})
    found: dict[str, Any] = {"whole": verify_checkpoint(whole).notes}
    for kind in DAMAGES:
        damaged = Path(folder, kind)
        if dist.get_rank() == 0:
            shutil.copytree(whole, damaged)
            damage(damaged, kind)
        dist.barrier()
        found[kind] = told(verify_checkpoint, damaged)
    return found


@pytest.mark.multirank
def test_every_damage_is_told_by_all_ranks_and_names_the_file(tmp_path):
    of_ranks = run_ranks(save_and_damage, 3, str(tmp_path))
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert of_ranks[0].pop("whole") == {"skipped": 3}
    for kind, text in of_ranks[0].items():
        named = {"flipped metadata": ".metadata", "no metadata": ".metadata"}
        named |= {"changed sidecar": SIDECAR}
        assert named.get(kind, "__1_0.distcp") in text, (kind, text)
        assert str(tmp_path / kind) in text
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == [
        *(".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", SIDECAR),
    ]
    # What a change of size or a missing file tells, without reading.
    for kind in ("truncated", "missing", "changed sidecar", "no metadata"):
        assert why_incomplete(tmp_path / kind), kind
    assert why_incomplete(tmp_path / "step-1") is None
    # Any number of ranks checks what three have saved; stock loads it.
    assert verify_checkpoint(tmp_path / "step-1").notes == {"skipped": 3}
    _, _, state = state_of_a_model()
    dcp.load(state, checkpoint_id=tmp_path / "step-1", no_dist=True)


class Payload:
    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


def test_nothing_is_unpickled_before_it_is_checked(tmp_path):
    save(tmp_path / "step-1", KEY)
    payload = Payload()
    payload.mark = str(tmp_path / "was unpickled")
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(payload))
    for key in (None, KEY):
        assert ".metadata is damaged" in told(verify_checkpoint, tmp_path / "step-1", key)
    with pytest.raises(dcp.CheckpointException):  # what happens otherwise
        dcp.load({}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert Path(payload.mark).exists()


def test_a_key_takes_only_what_is_signed_with_it(tmp_path):
    signed, unsigned, stock = (tmp_path / name for name in ("step-1", "step-2", "step-3"))
    save(signed, KEY)
    save(unsigned)
    dcp.save(state_of_a_model()[2], checkpoint_id=stock, no_dist=True)
    assert verify_checkpoint(signed, KEY) == verify_checkpoint(signed) is not None
    assert "signed with another key" in told(verify_checkpoint, signed, OTHER_KEY)
    for path in (unsigned, stock):
        assert f"{path} is not signed" in told(verify_checkpoint, path, KEY)
    # Hashes that fit changed files do not help without the key.
    data = signed / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[::-1])
    sidecar = json.loads((signed / SIDECAR).read_text())
    sidecar["files"][data.name]["sha256"] = hashlib.sha256(data.read_bytes()).hexdigest()
    (signed / SIDECAR).write_text(json.dumps(sidecar))
    assert "signed with another key, or was changed" in told(verify_checkpoint, signed, KEY)


@pytest.mark.parametrize("hex_digits", [5, "\xe9"])
def test_a_seal_that_is_no_hex_is_damage(tmp_path, hex_digits):
    save(tmp_path / "step-1")
    file = tmp_path / "step-1" / SIDECAR
    sidecar = json.loads(file.read_text())
    sidecar["seal"]["hex"] = hex_digits
    file.write_text(json.dumps(sidecar))
    assert f"{file} is damaged" in told(verify_checkpoint, tmp_path / "step-1")


def test_a_bad_key_file_is_named(tmp_path):
    short = tmp_path / "short"
    short.write_bytes(b"x" * (MIN_KEY_BYTES - 1))
    assert f"{short} has {MIN_KEY_BYTES - 1} bytes" in told(read_key, short)
    assert str(tmp_path / "none") in told(read_key, tmp_path / "none")
    short.write_bytes(KEY)
    assert read_key(short) == KEY


def test_a_stock_checkpoint_has_no_checksums_and_that_is_logged(tmp_path, caplog):
    dcp.save(state_of_a_model()[2], checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert verify_checkpoint(tmp_path / "step-1") is None
    assert f"{tmp_path / 'step-1'} has no checksums" in caplog.text


# Interrupted saves.


def test_an_interrupted_save_is_finished_or_cleared(tmp_path, caplog):
    for step in (1, 2, 3, 4):
        save(tmp_path / f"step-{step}", notes={"step": step})
    for step in (1, 2, 3):  # killed before the last rename, ...
        save(tmp_path / f"new-{step}", notes={"step": -step})
        unfinished(tmp_path / "step-1").parent.mkdir(exist_ok=True)
        (tmp_path / f"new-{step}").rename(unfinished(tmp_path / f"step-{step}"))
    shutil.rmtree(tmp_path / "step-1")  # ... with nothing in its place,
    (tmp_path / "step-2" / ".metadata").unlink()  # with a part of an older one, and with a whole
    shutil.copytree(tmp_path / "step-4", unfinished(tmp_path / "step-5"))
    (unfinished(tmp_path / "step-5") / SIDECAR).unlink()  # killed before all was written
    finish_interrupted(tmp_path)
    found = find_checkpoints(tmp_path)
    assert {s: read_sidecar(p).notes["step"] for s, p in found.complete.items()} == {
        **{1: -1, 2: -2, 3: 3, 4: 4},
    }
    assert not found.broken
    assert not unfinished(tmp_path / "step-1").parent.exists()
    assert f"removing {unfinished(tmp_path / 'step-5')}" in caplog.text
    for path in found.complete.values():
        verify_checkpoint(path)


def test_a_new_save_takes_the_place_of_an_old_one(tmp_path):
    for number in (1, 2):
        save(tmp_path / "step-1", notes={"number": number})
    assert verify_checkpoint(tmp_path / "step-1").notes == {"number": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.multirank
def test_no_kill_loses_or_halves_a_checkpoint():
    script = Path(__file__).parent / "kill_saves.py"
    done = subprocess.run(
        [sys.executable, str(script), "20", "1"],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(script.parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 20 and found["in a save"] >= 5
    assert found["lost"] == found["bad"] == []


# A save that fails.


def fail_and_save_again(folder: str, is_async: bool) -> dict[str, Any]:
    model, optimizer, state = state_of_a_model({"wide": (512, 512), "norm": (97,)})
    before = everything(model, optimizer)
    path = Path(folder, "step-2")
    found = {}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_once(path: Path) -> None:
        with told_by_all(f"{path} is not saved"):
            if is_async:
                group = dist.new_group(backend="gloo")
                writer = CheckpointWriter(path)
                dcp.async_save(state, storage_writer=writer, process_group=group).result()
            else:
                dcp.save(state, storage_writer=CheckpointWriter(path))

    save_once(Path(folder, "step-1"))
    if dist.get_rank() == 1:  # its disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    found["full"] = told(save_once, path)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not path.exists()
    Path(folder, "file").touch()
    found["unwritable"] = told(save_once, Path(folder, "file", "step-2"))
    assert not differing(before, everything(model, optimizer))
    verify_checkpoint(Path(folder, "step-1"))
    save_once(path)
    verify_checkpoint(path)
    return found


@pytest.mark.multirank
@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_on_one_rank_is_told_by_all_and_harms_nothing(tmp_path, is_async):
    first, second = run_ranks(fail_and_save_again, 2, str(tmp_path), is_async)
    assert first == second
    file = tmp_path / "unfinished" / "step-2" / "__1_0.distcp"
    assert f"step-2 is not saved: rank 1: cannot write {file}: [Errno 27] File" in first["full"]
    assert "Not a directory" in first["unwritable"] and str(tmp_path) in first["unwritable"]
    assert find_checkpoints(tmp_path).complete.keys() == {1, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step-1", "step-2"]


# A checkpoint that does not fit.


def load_what_does_not_fit(folder: str) -> str:
    save(Path(folder))
    shapes = {"wide": (200, 301), "new": (3, 4)}
    model, optimizer, state = state_of_a_model(shapes)
    before = everything(model, optimizer)
    for name in ("step", "exp_avg"):  # of one dtype on one rank only: told all the same
        if dist.get_rank() == 1:
            state["optimizer"][f"state.weights.wide.weight.{name}"] = torch.zeros(
                (), dtype=torch.int8
            )

    def load() -> None:
        with told_by_all(folder):
            dcp.load(state, checkpoint_id=folder, planner=StrictLoadPlanner({"optimizer"}))

    text = told(load)
    assert not differing(before, everything(model, optimizer))
    return text


@pytest.mark.multirank
def test_one_error_lists_all_that_differs_before_anything_is_loaded(tmp_path):
    first, second = run_ranks(load_what_does_not_fit, 2, str(tmp_path / "step-1"))
    assert first == second
    for line in (
        "weights.wide.weight: shape (200, 300) in the checkpoint, (200, 301) here",
        "weights.new.weight: missing in the checkpoint",
        "weights.norm.weight: in the checkpoint, but not here",
        "optimizer.state.weights.wide.weight.exp_avg_sq: shape (200, 300) in the checkpoint",
        "optimizer.state.weights.norm.weight.exp_avg: in the checkpoint, but not here",
        "optimizer.state.weights.wide.weight.step: torch.float32 in the checkpoint, torch.int8",
        "optimizer.state.weights.new.weight.exp_avg: missing in the checkpoint",
    ):
        assert line in first


def test_a_cast_checkpoint_gives_weights_to_start_from_but_resumes_nothing(tmp_path):
    model, _, state = state_of_a_model()
    cast = {k: v.to(torch.bfloat16) if torch.is_tensor(v) else v for k, v in state.items()}
    dcp.save(cast, storage_writer=CheckpointWriter(tmp_path / "step-1"), no_dist=True)
    weights = {k: v for k, v in state.items() if k != "optimizer"}
    planner = StrictLoadPlanner({"optimizer"})
    dcp.load(weights, checkpoint_id=tmp_path / "step-1", planner=planner, no_dist=True)
    expected = GivenGradients(SHAPES).weights["wide"].weight.bfloat16().float()
    assert torch.equal(everything(model)["weights.wide.weight.main"], expected)
    with (
        pytest.raises(CheckpointError, match=r"wide\.weight: torch.bfloat16 in the checkpoint"),
        told_by_all("x"),
    ):
        dcp.load(state, checkpoint_id=tmp_path / "step-1", planner=planner, no_dist=True)


def test_main_values_and_moments_are_stored_in_fp32_under_bf16_compute(tmp_path):
    model = GivenGradients(SHAPES)
    _, optimizer = shard(model, None, compute_dtype=torch.bfloat16)
    gradients = {name: torch.full(shape, 1e-3) for name, shape in SHAPES.items()}
    model(gradients).backward()
    optimizer.step()
    state = {**model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "step-1"))
    stored = CheckpointReader(tmp_path / "step-1").read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in stored.items() if hasattr(entry, "properties")}
    assert tensors.keys() == {
        *(f"weights.{name}.weight" for name in SHAPES),
        *(
            f"optimizer.state.weights.{name}.weight.{part}"
            for name in SHAPES
            for part in ("exp_avg", "exp_avg_sq", "step")
        ),
    }
    assert {entry.properties.dtype for entry in tensors.values()} == {torch.float32}
    saved, (loaded, other, state) = everything(model, optimizer), state_of_a_model()
    dcp.load(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    load_optimizer_state_dict(loaded, other, state["optimizer"])
    restored = everything(loaded, other)
    fp32 = {name for name in saved if not name.endswith((".codes", ".scale_inv", ".values"))}
    assert not differing({n: saved[n] for n in fp32}, {n: restored[n] for n in fp32})
    assert not torch.equal(
        *(saved["weights.wide.weight.main"].to(d).float() for d in (torch.float32, torch.bfloat16))
    )


# State of weights without an update.


def test_saving_before_a_weights_first_update_changes_nothing(tmp_path):
    """Its first step was skipped, or no rank used it: the state of no step at all is saved."""
    gradients = {name: torch.ones(shape) for name, shape in SHAPES.items()}

    def train(saves: bool) -> tuple[Any, Any]:
        model = GivenGradients(SHAPES)
        zero1, optimizer = shard(model, None, "blockwise_foreach")
        nan = {name: gradient * float("nan") for name, gradient in gradients.items()}
        for step, given in enumerate((nan, {"wide": gradients["wide"]}, gradients)):
            optimizer.zero_grad()
            model(given).backward()
            optimizer.step()
            if saves and step < 2:
                state = {**model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}
                dcp.save(state, storage_writer=CheckpointWriter(tmp_path / f"step-{step}"))
                assert zero1.skipped_steps == 1
        return model, optimizer

    straight, saving = everything(*train(False)), everything(*train(True))
    assert not differing(straight, saving)
    model, optimizer, state = state_of_a_model()
    dcp.load(state, checkpoint_id=tmp_path / "step-1", no_dist=True)
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
    model.load_state_dict({k: v for k, v in state.items() if k != "optimizer"})
    steps = [optimizer.state[p]["step"].item() for p in optimizer.param_groups[0]["params"]]
    assert steps == [1.0, 0.0]
    model(gradients).backward()
    optimizer.step()
    assert not differing(straight, everything(model, optimizer))


# Memory.


def peak_extra_bytes(action: Any) -> int:
    """The most of resident memory that `action` needs beside what there is before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


def measure_memory(folder: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    m_mmap_threshold = -3  # what is freed goes back at once, and counts when it is used again
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)
    state = state_of_a_model(shapes)[2]

    def save() -> None:
        dcp.save(state, storage_writer=CheckpointWriter(folder))

    def load() -> None:
        verify_checkpoint(folder)
        planner = StrictLoadPlanner({"optimizer"})
        dcp.load(state, storage_reader=CheckpointReader(folder), planner=planner)

    save()
    load()  # what stays: caches, imports
    return {"save": peak_extra_bytes(save), "load": peak_extra_bytes(load)}


@pytest.mark.multirank
def test_saving_and_loading_need_one_box_of_memory_and_no_copy_of_the_state(tmp_path):
    shapes = {f"w{i}": (1024, 2048) for i in range(6)}
    box = 1024 * 2048 * 4
    (measured,) = run_ranks(measure_memory, 1, str(tmp_path / "step-1"), shapes)
    print({name: f"{extra / box:.2f} boxes" for name, extra in measured.items()})
    assert max(measured.values()) < 1.3 * box, measured  # of 18 that the state has
