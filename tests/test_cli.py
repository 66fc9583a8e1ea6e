import json
import os
import signal
import subprocess
import sys
import traceback
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_fp8zero import cli
from titan_fp8zero.job import Job, load_job
from titan_fp8zero.metrics_file import MetricsWriter, read_metrics
from titan_fp8zero.spawn import TRACEBACK_LINES, RankFailure, RanksFailed, _error_text

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "train_configs"
LLAMA = str(CONFIGS / "llama3_baseline.toml")


class Command:
    """`titan-fp8zero train` of a tiny run on two CPU ranks, in a process of its own."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self._mark = f"mark-{uuid.uuid4().hex}"
        small = {
            "--job.dump_folder": f"{folder}/run",
            "--model.hf_assets_path": f"{folder}/python_docs_tokenizer",
            "--training.local_batch_size": "1",
            "--training.seq_len": "64",
            "--metrics.log_freq": "1",
        }
        args = [*(word for option in small.items() for word in option), "--validation.no-enable"]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "titan_fp8zero.cli", "train", LLAMA, *args, *overrides],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{folder}",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "TEST_MARK": self._mark,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Its exit code, what is left of its output, and its errors."""
        out, err = self.process.communicate()
        assert not self._alive(), "a process is left"
        return self.process.returncode, out, err

    def _alive(self) -> list[int]:
        """Processes that inherited our mark: it and its ranks."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
            except OSError:  # ended meanwhile
                continue
        return found


def broken_module(folder: Path, statement: str) -> None:
    """A module to import in the ranks, in which rank 1 breaks."""
    (folder / "broken.py").write_text(
        f"import os, signal, titan_fp8zero.titan\nif os.environ['RANK'] == '1':\n    {statement}\n"
    )


@pytest.mark.multirank
def test_train_writes_metrics_and_plot_and_shows_both_logs(tmp_path):
    code, out, err = Command(tmp_path, "--training.steps", "3").finish()
    assert code == 0, err
    metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    expected = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "memory", "n_tokens_seen"}
    assert all(set(line) == expected for line in metrics)
    assert 7 < metrics[0]["loss"] < 9
    assert metrics[2]["n_tokens_seen"] == 3 * 2 * 64
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run/tb").rglob("events*")), "TensorBoard"

    lines = out.splitlines()
    for step in (1, 2, 3):
        loss = metrics[step - 1]["loss"]
        assert any(f"step:  {step} " in line and f"{loss:.5f}" in line for line in lines)
        progress = [line for line in lines if line.startswith(f"step {step}/3  loss {loss:.4f}")]
        assert len(progress) == 1 and "tokens/s  ETA" in progress[0]
    assert "applied patch gloo_sum" in out
    assert "[rank1]" not in out


@pytest.mark.multirank
def test_a_rank_that_dies_is_named_and_ends_the_run(tmp_path):
    broken_module(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    code, _, err = Command(tmp_path, "--experimental.custom_import", "broken").finish()
    assert code == 1
    report = err[err.index("titan-fp8zero: rank 1 failed") :]
    assert "(exit code -9)" in report and "killed by SIGKILL" in report


@pytest.mark.multirank
def test_missing_dataset_path_is_an_error_that_names_the_key(tmp_path):
    code, _, err = Command(tmp_path, "--training.dataset", "local_text").finish()
    assert code == 1
    report = err[err.index("titan-fp8zero: rank") :]
    assert "(exit code 1)" in report and "training.dataset_path" in report


@pytest.mark.multirank
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_no_process(tmp_path, number, code):
    command = Command(tmp_path, "--training.steps", "100000")
    for line in command.process.stdout:
        if line.startswith("step 1/"):
            break
    command.process.send_signal(number)
    returned, _, err = command.finish()
    assert returned == code, err
    assert f"ended by {number.name}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "no.toml"], "config file no.toml: no such file"),
        (["train", LLAMA, "--parallelism.data_parallel_shard_degree", "3"], "2 ranks do not fit"),
        (["train", LLAMA, "--nproc", "3", "--parallelism.tensor_parallel_degree=2"], "3 ranks do"),
        (["train", LLAMA, "--parallelism.expert_parallel_degree", "4"], "does not divide the 2"),
        (["train", LLAMA, "--job.custom_config_module", "gone"], "No module named 'gone'"),
        (["compare", LLAMA, LLAMA], "name two"),
        (["bench", "step", LLAMA], 'has no "blockwise_fp8"'),
    ],
)
def test_bad_input_is_an_error_before_any_rank_starts(monkeypatch, capsys, args, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in ("job", "cli"):
        monkeypatch.setattr(f"titan_fp8zero.{module}.run_on_ranks", lambda *a, **k: pytest.fail())
    assert cli.main(args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        (["compare", LLAMA, LLAMA, "--out", "FILE"], "FILE cannot be a folder: File exists"),
        (["bench", "kernels", "--out", "FILE/x"], "FILE/x cannot be a folder: Not a directory"),
        (["plan", LLAMA, "--json", "FILE/x.json"], "FILE cannot be a folder"),
        (["plan", LLAMA, "--json", "."], ". is a folder, expected a file"),
        (["plan", LLAMA, "--png", "x.xyz"], "x.xyz does not end in .png"),
    ],
)
def test_where_nothing_can_be_written_is_an_error_before_anything_runs(
    tmp_path, capsys, args, message
):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match="2"):
        cli.main([arg.replace("FILE", str(file)) for arg in args])
    assert message.replace("FILE", str(file)) in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message",
    [
        ("x = [", "is not TOML"),
        ("[training]\nstepz = 3\n", "stepz"),
        (
            '[job]\ncustom_config_module = "titan_fp8zero.titan.config"\n[blockwise_fp8]\nx = 1\n',
            "BlockwiseFP8'> data: {'x'}",
        ),
    ],
)
def test_bad_config_is_an_error_that_names_it(tmp_path, capsys, content, message):
    config = tmp_path / "config.toml"
    config.write_text(content)
    assert cli.main(["train", str(config)]) == 2
    error = capsys.readouterr().err
    assert message in error and str(config) in error


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "COMMAND"),
        (["tain"], "invalid choice"),
        (["train"], "CONFIG"),
        (["train", LLAMA, "--nproc", "0"], "0 is not a positive whole number"),
        (["train", LLAMA, "--training.stepz", "3"], "--training.stepz"),
        (["compare", LLAMA], "the following arguments are required: B"),
        (["export", "ckpt", "hf"], "the following arguments are required: --config"),
        (["export", "ckpt", "hf", "--config", LLAMA, "--shard-gb", "0"], "0 is not a positive"),
        (["import", "hf", "ckpt", "--config", LLAMA, "--training.stepz", "3"], "--training.stepz"),
        (["compare", LLAMA, LLAMA, "--training.steps", "3"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_told(capsys, args, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(args)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, option",
    [
        ("train", "--nproc N"),
        ("compare", "--nproc N"),
        ("export", "--config CONFIG"),
        ("import", "--config CONFIG"),
    ],
)
def test_every_option_has_help(capsys, command, option):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert option in capsys.readouterr().out


def test_gpus_are_taken_where_there_are_some(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert load_job(Path(LLAMA), [], None).nproc == 4
    assert cli.main(["train", LLAMA, "--nproc", "5"]) == 2
    assert "this machine has 4 GPUs" in capsys.readouterr().err


def test_with_pipeline_stages_the_rank_that_knows_the_loss_is_shown(monkeypatch):
    shown = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(
        "titan_fp8zero.job.run_on_ranks", lambda *args, shown_ranks: shown.append(shown_ranks)
    )
    pipeline = ["--parallelism.pipeline_parallel_degree", "2"]
    load_job(Path(LLAMA), pipeline, 4).train()
    load_job(Path(LLAMA), [], 4).train()
    assert shown == [{0, 2}, {0}]


def test_the_first_failure_is_told_in_full_others_in_a_line():
    error = RanksFailed([RankFailure(2, 1, "Traceback\nCause"), RankFailure(0, 1, "long\nResult")])
    assert str(error) == (
        "rank 2 failed (exit code 1):\nTraceback\nCause\nrank 0 failed too (exit code 1): Result"
    )


@pytest.fixture
def fake_training(monkeypatch):
    """Training that only writes metrics: `b` is one percent above `a`, and not finite at step 2."""
    trained = []

    def train(job):
        trained.append(job)
        writer = MetricsWriter(job.metrics_file, first_step=1)
        worse = 1.01 if job.config_file.stem == "b" else 1.0
        for step in range(1, job.config.training.steps + 1):
            loss = float("nan") if worse > 1 and step == 2 else 8.0 * worse / step
            writer.write({"step": step, "loss": loss, "tokens_per_s": 1000.0 * worse})
            writer.write({"step": step, "validation_loss": 1.0})
        writer.close()

    monkeypatch.setattr(Job, "train", train)
    return trained


def two_configs(folder, **replacements):
    content = Path(LLAMA).read_text()
    (folder / "a.toml").write_text(content)
    for old, new in replacements.values():
        assert old in content
        content = content.replace(old, new)
    (folder / "b.toml").write_text(content)
    return [str(folder / "a.toml"), str(folder / "b.toml")]


def test_compare_of_a_run_that_ends_not_finite_is_still_json(tmp_path, capsys, fake_training):
    configs = two_configs(tmp_path)
    assert cli.main(["compare", *configs, "--steps", "3", "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out/compare.json").read_text(), parse_constant=pytest.fail)
    assert result["last_loss_b"] is None and result["last_loss_relative_difference"] is None
    assert "not finite" in capsys.readouterr().out


def test_compare_trains_both_alike_and_writes_table_and_plot(tmp_path, capsys, fake_training):
    configs = two_configs(tmp_path, seed=("seed = 42", "seed = 7"), lr=("lr = 1e-3", "lr = 3e-3"))
    out = tmp_path / "out"
    assert cli.main(["compare", *configs, "--steps", "30", "--out", str(out)]) == 0

    first, second = (job.config for job in fake_training)
    assert first.debug.seed == second.debug.seed == 42
    assert first.metrics.log_freq == second.metrics.log_freq == 1
    assert first.training.steps == second.training.steps == 30
    assert not first.checkpoint.enable and not second.checkpoint.enable
    assert first.job.dump_folder != second.job.dump_folder
    assert (first.optimizer.lr, second.optimizer.lr) == (1e-3, 3e-3)

    result = json.loads((out / "compare.json").read_text())
    assert [row["step"] for row in result["steps"]] == list(range(1, 31))
    assert result["steps"][0]["relative_difference"] == pytest.approx(0.01)
    assert result["steps"][1]["loss_b"] is None
    assert result["steps"][1]["relative_difference"] is None
    assert result["last_loss_a"] == pytest.approx(sum(8 / step for step in range(11, 31)) / 20)
    assert result["last_loss_relative_difference"] == pytest.approx(0.01)
    assert result["b"]["tokens_per_s"] == pytest.approx(1010)
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "| 30 | 0.26667 | 0.26933 | +1.000% |" in (out / "compare.md").read_text()
    printed = capsys.readouterr().out
    assert "mean of last 20" in printed and "+1.000%" in printed


def test_compare_of_configs_that_write_no_metrics_says_what_to_import(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Job, "train", lambda job: None)
    stale = tmp_path / "out/a_a/metrics.jsonl"  # of an earlier comparison
    stale.parent.mkdir(parents=True)
    stale.write_text('{"step": 1, "loss": 8.0, "tokens_per_s": 1.0}\n')
    assert cli.main(["compare", *two_configs(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert 'custom_import has to be "titan_fp8zero.titan"' in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("seq_len = 256", "seq_len = 128", "training.seq_len: 256 and 128"),
        ("local_batch_size = 4", "local_batch_size = 2", "training.local_batch_size: 4 and 2"),
        ('dataset = "python_docs"\n', 'dataset = "c4"\n', "training.dataset: 'python_docs' and"),
        ("steps = 100", "steps = 50", "training.steps: 100 and 50"),
        ("degree = -1", "degree = 1\ntensor_parallel_degree = 2", "read data: 2 and 1"),
    ],
)
def test_compare_refuses_different_data(tmp_path, capsys, fake_training, old, new, told):
    configs = two_configs(tmp_path, replacement=(old, new))
    assert cli.main(["compare", *configs, "--nproc", "2", "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert not fake_training


def test_the_cause_of_an_error_is_told_with_it(tmp_path):
    """As of a collective that fails in a pipeline stage, whose own error says nothing of it."""
    try:
        try:
            raise RuntimeError("ranks [3] died")
        except RuntimeError as error:
            raise ValueError(
                "Failed to run stage backward:\n" + "Input: a tensor\n" * 20
            ) from error
    except ValueError:
        message = {"extraInfo": {"py_callstack": traceback.format_exc()}}
    told = _error_text(SimpleNamespace(message=message, exitcode=1), 2, tmp_path).splitlines()
    assert told[-2:] == ["Input: a tensor", "caused by RuntimeError: ranks [3] died"]
    assert len(told) == TRACEBACK_LINES + 1
