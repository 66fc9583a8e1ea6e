import json
import math
from types import SimpleNamespace

import pytest
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig

from titan_fp8zero.metrics_file import MetricsFollower, MetricsWriter, read_metrics
from titan_fp8zero.titan import metrics as titan_metrics


def dims(dp_shard=2, pp=1, **degrees):
    world = dp_shard * pp * degrees.get("tp", 1)
    return SimpleNamespace(
        dp_replicate=1,
        dp_shard=dp_shard,
        pp=pp,
        pp_enabled=pp > 1,
        world_size=world,
        non_data_parallel_size=world // dp_shard,
    )


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds a rank's processor, with the device's memory and the clock replaced."""
    memory = SimpleNamespace(
        device_name="A100",
        reset_peak_stats=lambda: None,
        get_peak_stats=lambda: SimpleNamespace(
            max_active_gib=1.0,
            max_active_pct=1.0,
            max_reserved_gib=1.5,
            max_reserved_pct=2.0,
            num_alloc_retries=0,
            num_ooms=0,
        ),
    )
    stock = "torchtitan.components.metrics"
    monkeypatch.setattr(f"{stock}.build_device_memory_monitor", lambda: memory)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)

    def build(rank=0, parallel_dims=None):
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
        config = JobConfig()
        config.job.dump_folder = str(tmp_path)
        processor = titan_metrics.build_metrics_processor(config, parallel_dims or dims())
        processor.num_flops_per_token = 1
        processor.clock = clock
        return processor

    return build


def train(processor, steps, loss=lambda step: 8.0 - step):
    for step in steps:
        processor.should_log(step)
        processor.ntokens_since_last_log = 1000
        processor.data_loading_times.append(0.1)
        processor.clock.now += 0.5
        processor.log(step, loss(step), 9.0, 0.25, extra_metrics={"lr": 1e-3, "note": "text"})


def validate(processor, step, loss):
    processor.clock.now += 0.5
    processor.log_validation(loss, step)


def test_a_logged_step_is_one_json_object(build, tmp_path, caplog):
    processor = build()
    with caplog.at_level("INFO"):
        train(processor, [1])
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "loss": 7.0,
            "grad_norm": 0.25,
            "tokens_per_s": 4000.0,  # 2 ranks, 1000 tokens each in half a second
            "memory": 1.5,
            "lr": 1e-3,
        }
    ]
    assert "loss:  7.00000" in caplog.text, "TorchTitan's own line stays"


def test_tokens_per_s_counts_ranks_that_share_data_once(build, tmp_path):
    train(build(parallel_dims=dims(dp_shard=2, tp=4)), [1])
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["tokens_per_s"] == 4000.0


def test_numbers_that_are_not_finite_are_null(build, tmp_path):
    processor = build()
    train(processor, [1], loss=lambda step: math.nan)
    validate(processor, 1, math.inf)
    content = (tmp_path / "metrics.jsonl").read_text()
    step, validation = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        for line in content.splitlines()
    ]
    assert step["loss"] is None and step["grad_norm"] == 0.25
    assert validation == {"step": 1, "validation_loss": None}


def test_only_the_rank_that_knows_the_loss_writes(build, tmp_path):
    train(build(rank=1), [1])
    assert not (tmp_path / "metrics.jsonl").exists()
    train(build(rank=2, parallel_dims=dims(dp_shard=2, pp=2)), [1])
    assert (tmp_path / "metrics.jsonl").exists()
    assert type(build(rank=1)) is MetricsProcessor


def test_a_resumed_run_drops_the_steps_it_repeats(build, tmp_path):
    train(build(), range(1, 8))
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 8, "lo')  # the run was killed in the middle of a line
    train(build(), range(5, 7), loss=lambda step: 100.0)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == [7.0, 6.0, 5.0, 4.0, 100.0, 100.0]


def test_a_fresh_run_starts_a_new_file(build, tmp_path):
    train(build(), range(1, 4))
    train(build(), [1])
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_close_draws_training_and_validation_loss(build, tmp_path):
    from matplotlib.image import imread

    processor = build()
    train(processor, range(1, 4))
    processor.close()
    without = imread(tmp_path / "loss.png")
    processor = build()
    train(processor, range(1, 4))
    validate(processor, 3, 5.0)
    processor.close()
    image = imread(tmp_path / "loss.png")
    assert image.shape[0] > 300 and image.min() < image.max()
    assert (image != without).any(), "the validation loss shows"


def test_close_without_a_step_leaves_no_plot(build, tmp_path):
    build().close()
    assert not (tmp_path / "loss.png").exists()


def test_follower_reads_new_whole_lines_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    earlier = MetricsWriter(path, first_step=1)
    for step in (1, 2, 3):
        earlier.write({"step": step, "loss": 1.0})
    earlier.close()

    follower = MetricsFollower(path)
    assert follower.read() == []
    writer = MetricsWriter(path, first_step=3)  # a run resumed at step 2 keeps steps 1 and 2
    assert follower.read() == []
    writer.write({"step": 3, "loss": 0.5})
    writer._stream.write('{"step": 4,')
    writer._stream.flush()
    assert follower.read() == [{"step": 3, "loss": 0.5}]
    writer._stream.write(' "loss": 0.25}\n')
    writer._stream.flush()
    assert follower.read() == [{"step": 4, "loss": 0.25}]
    assert follower.read() == []


def test_follower_waits_for_the_file(tmp_path):
    follower = MetricsFollower(tmp_path / "metrics.jsonl")
    assert follower.read() == []
    MetricsWriter(tmp_path / "metrics.jsonl", first_step=1).write({"step": 1, "loss": 2.0})
    assert follower.read() == [{"step": 1, "loss": 2.0}]
