"""Benchmarks: what they print and write. How fast things are is for them to say, not for tests."""

import json
from pathlib import Path

import pytest
import torch

from titan_fp8zero.bench import gemm, kernels, train
from titan_fp8zero.bench.measure import Machine, measure_machine, median_ms
from titan_fp8zero.bench.report import Report, Row
from titan_fp8zero.cli import main

MACHINE = Machine("a GPU", copy_gb_per_s=4000.0, gemm_tflop_per_s=800.0)


def test_a_report_holds_rows_against_the_machine_and_their_peers(tmp_path, capsys):
    rows = [
        Row("stock", ms=4.0, gbytes=14.0),
        Row("ours", ms=3.0, gbytes=11.4, peer="stock"),
        Row("GEMM", ms=0.5, gbytes=0.1, gflop=240.0),
    ]
    report = Report("kernels", MACHINE, rows)
    assert report.ratio(rows[1]) == 0.75
    assert report.ratio(rows[0]) is None
    report.print()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "a GPU: copies 4,000 GB/s, multiplies 800.0 TFLOP/s"
    (ours,) = [line for line in printed if "ours" in line]
    assert [cell.strip() for cell in ours.split("│")[1:-1]] == [
        *("ours", "3.000", "3,800", "0.950", "", "", "0.750", "stock")
    ]
    (gemm,) = [line for line in printed if "│ GEMM" in line]
    assert "480.0" in gemm and "0.600" in gemm
    report.write(tmp_path / "out", "kernels")
    written = json.loads((tmp_path / "out" / "kernels.json").read_text())
    assert written["machine"]["copy_gb_per_s"] == 4000.0
    assert written["rows"][1] == {
        **{"name": "ours", "ms": 3.0, "gbytes": 11.4, "gflop": 0.0, "peer": "stock"}
    }
    assert (tmp_path / "out" / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_no_cell_is_cut_off_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    peer, name = (
        "AdamW(fused=True), fp32 gradient",
        "quantize columns, 8 experts, bf16 8192 x 14336",
    )
    rows = [Row(peer, ms=1.0), Row(name, ms=1234.5, gbytes=1e6, gflop=1e6, peer=peer)]
    Report("kernels", MACHINE, rows).print()
    (row,) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        *(name, "1,234.500", "810,045", "202.511", "810.0", "1.013", "1234.500", peer)
    ]


def test_a_machine_is_measured():
    machine = measure_machine(torch.device("cpu"))
    assert 0.1 < machine.copy_gb_per_s < 1e5
    assert 1e-4 < machine.gemm_tflop_per_s < 1e4


def test_the_median_of_calls_is_taken():
    calls = []
    assert median_ms(lambda: calls.append(1), torch.device("cpu")) >= 0
    assert len(calls) > 5


@pytest.mark.multirank
def test_a_step_is_measured_phase_by_phase(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).parents[1] / "train_configs"
    arguments = ["--nproc", "1", "--training.seq_len", "64", "--job.dump_folder", "out"]
    assert main(["bench", "step", str(config / "llama3_debug.toml"), *arguments]) == 0
    rows = {
        row["name"]: row for row in json.loads((tmp_path / "out/step.json").read_text())["rows"]
    }
    phases = ("backward: fold, reduce", "clip", "update, quantize", "publish: gather, unfold")
    for variant in ("FP8", "high-precision"):
        assert rows[f"{variant} step"]["ms"] > 0
        assert all(rows[f"{variant} {phase}"]["ms"] > 0 for phase in phases)
    assert rows["high-precision step"]["peer"] == "FP8 step"
    assert "FP8 update, quantize" in capfd.readouterr().out


def test_throughput_is_that_of_a_rank(tmp_path, monkeypatch):
    class Job:
        metrics_file = tmp_path / "metrics.jsonl"
        nproc = 4

        def train(self):
            lines = [
                {"step": step, "loss": 1.0, "tokens_per_s": 400.0 * step, "memory": 8.0 - step}
                for step in range(1, 6)
            ]
            self.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(train, "load_job", lambda *args: Job())
    monkeypatch.setattr(train, "measure_machine", lambda device: MACHINE)
    train.bench_train([Path("a.toml")], [], 5, None, tmp_path / "out")
    (throughput,) = json.loads((tmp_path / "out" / "train.json").read_text())["throughputs"]
    assert throughput == {"config": "a", "tokens_per_s": 400.0, "memory_gib": 7.0}


def test_too_few_steps_to_measure_are_refused(capsys):
    assert main(["bench", "train", "no.toml", "--steps", "3"]) == 2
    assert "--steps 3" in capsys.readouterr().err


def bench(command, folder, monkeypatch):
    """The rows of `bench COMMAND`, by name, on a machine that need not be measured."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in (kernels, gemm):
        monkeypatch.setattr(module, "measure_machine", lambda device: MACHINE)
    assert main(["bench", command, "--out", str(folder)]) == 0
    assert (folder / f"{command}.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((folder / f"{command}.json").read_text())
    assert written["machine"]["name"] == MACHINE.name
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"]), "two rows of one name"
    assert all(row["ms"] > 0 for row in rows.values())
    return rows


def test_each_kernel_is_held_against_the_bytes_it_must_move(tmp_path, monkeypatch, capsys):
    rows = bench("kernels", tmp_path, monkeypatch)
    weight, bucket, x = 512 * 1024, 1152 * 512, 1024 * 256
    scales, bucket_scales = 4 * weight // 128**2, 4 * bucket // 128**2
    adamw = "AdamW(fused=True), fp32 gradient"
    expected = {
        adamw: 28 * weight,
        "update and quantize, fp32 gradient": 29 * weight + scales,
        "update and quantize, bf16 gradient": 27 * weight + scales,
        "quantize": 5 * weight + scales,
        "fold-accumulate, bf16 into bf16": 6 * weight,
        "fold-accumulate, bf16 into fp32": 10 * weight,
        "fold-accumulate, fp32 into fp32": 12 * weight,
        "fold, bf16 into fp32": 6 * weight,
        "unfold, row-major": 2 * (bucket + bucket_scales),
        "unfold, row-major and transposed": 3 * bucket + 2 * bucket_scales,
        "quantize rows, bf16 1024 x 256": 3 * x + 4 * x // 128,
        "quantize columns, bf16 1024 x 256": 3 * x + 4 * x // 128,
        "quantize rows and columns, bf16 1024 x 256": 4 * x + 8 * x // 128,
        "quantize columns, 8 experts, bf16 1024 x 256": 3 * x + 4 * x // 128,
        "quantize rows, fp32 1024 x 128": 5 * x // 2 + 4 * x // 2 // 128,
        "dequantize rows, bf16 1024 x 256": 3 * x + 4 * x // 128,
    }
    moved = {name: round(row["gbytes"] * 1e9) for name, row in rows.items() if name in expected}
    assert moved == expected
    peers = {row["peer"] for name, row in rows.items() if name.startswith("update")}
    assert peers == {adamw} and not rows[adamw]["peer"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(MACHINE) and lines[-1].endswith("kernels.json, kernels.png")


def test_gemms_and_linears_are_held_against_their_peers(tmp_path, monkeypatch, capsys):
    with torch.compiler.set_stance("force_eager"):
        rows = bench("gemm", tmp_path, monkeypatch)
    for prefix in ("", "experts "):
        for product, stock in (
            ("forward", "x @ w.t()"),
            ("dgrad", "dy @ w"),
            ("wgrad", "dy.t() @ x"),
        ):
            peer = f"{prefix}{product}, bf16 {stock}"
            fp8 = rows[f"{prefix}{product}, FP8 by reference"]
            assert fp8["peer"] == peer and fp8["gflop"] == rows[peer]["gflop"] == 2 * 2**22 / 1e9
            assert fp8["gbytes"] < rows[peer]["gbytes"]
        assert (
            rows[f"{prefix}wgrad, bf16 by reference"]["peer"] == f"{prefix}wgrad, bf16 dy.t() @ x"
        )
        assert rows[f"{prefix}quantize rows of x"]["gbytes"] > 0
    for wgrad in ("bf16", "fp8"):
        linear = rows[f"linear, blockwise FP8, wgrad {wgrad}"]
        assert linear["peer"] == "linear, nn.Linear in bf16"
        assert linear["gflop"] == rows[linear["peer"]]["gflop"] == 3 * 2 * 2**22 / 1e9
    printed = capsys.readouterr().out
    assert printed.startswith(str(MACHINE))
    assert "not measured: deep_gemm" in printed and "not measured: torchao" in printed
