"""What our parts of TorchTitan decide before training: modules converted, features refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

import titan_fp8zero.titan  # noqa: F401  registers our train specs
from titan_fp8zero.experts import BlockwiseFP8GroupedExperts
from titan_fp8zero.linear import BlockwiseFP8Linear
from titan_fp8zero.titan.converter import BlockwiseFP8Converter, select_fqns
from titan_fp8zero.titan.refuse import refuse_unsupported

CONFIGS = Path(__file__).parent.parent / "train_configs"
FQNS = [
    *("layers.0.attention.wq", "layers.0.feed_forward.w1", "layers.1.attention.wq"),
    *("layers.1.moe.experts", "layers.1.moe.router.gate", "output"),
]


def job_config(model: str, *overrides: str) -> JobConfig:
    return ConfigManager().parse_args(
        ["--job.config_file", str(CONFIGS / f"{model}_debug.toml"), *overrides]
    )


def dims(**degrees: int) -> ParallelDims:
    all_one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    return ParallelDims(**{**all_one, **degrees}, world_size=world_size)


def converted_model(model: str, *overrides: str) -> nn.Module:
    config = job_config(model, *overrides)
    spec = get_train_spec(config.model.name)
    model_args = replace(spec.model_args[config.model.flavor])
    model_args.update_from_config(config)
    with torch.device("meta"):
        module = spec.model_cls(model_args)
    BlockwiseFP8Converter(config, dims()).convert(module)
    return module


def converted_fqns(module: nn.Module) -> set[str]:
    kinds = (BlockwiseFP8Linear, BlockwiseFP8GroupedExperts)
    return {fqn for fqn, child in module.named_modules() if isinstance(child, kinds)}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["default"], [0, 1, 2, 3]),
        ([], []),
        ([""], []),
        (["layers.0.*"], [0, 1]),
        (["*.attention.*"], [0, 2]),
        (["default", "!layers.1.*"], [0, 1]),
        (["layers.1.moe.experts", "layers.0.attention.wq"], [0, 3]),
        (["*"], [0, 1, 2, 3]),
    ],
)
def test_patterns_choose_modules(patterns: list[str], expected: list[int]) -> None:
    assert select_fqns(FQNS, patterns) == [FQNS[index] for index in expected]


@pytest.mark.parametrize(
    "pattern", ["layers.9.*", "output", "!nowhere", "layers.1.moe.router.gate"]
)
def test_a_pattern_without_a_match_is_an_error_that_names_it(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no module") as error:
        select_fqns(FQNS, ["default", pattern])
    assert repr(pattern) in str(error.value)
    assert "layers.0.attention.wq" in str(error.value)


def test_llama3_converts_attention_and_feed_forward_only() -> None:
    model = converted_model("llama3")
    linears = {fqn for fqn, child in model.named_modules() if isinstance(child, nn.Linear)}
    assert linears - converted_fqns(model) == {"output"}
    assert len(converted_fqns(model)) == 7 * len(model.layers)


def test_deepseek_v3_keeps_router_gates_and_converts_experts() -> None:
    model = converted_model("deepseek_v3")
    left = {fqn for fqn, child in model.named_modules() if isinstance(child, nn.Linear)}
    left -= converted_fqns(model)
    gates = {fqn for fqn in left if fqn.endswith("router.gate")}
    assert left - gates == {"output"}
    assert len(gates) == 5
    assert {f"layers.{layer}.moe.experts" for layer in range(1, 6)} <= converted_fqns(model)


def test_module_options_come_from_the_table() -> None:
    model = converted_model(
        "llama3", "--blockwise_fp8.wgrad", "fp8", "--blockwise_fp8.scale_format", "ue8m0"
    )
    config = model.get_submodule("layers.0.attention.wq").config
    assert (config.wgrad, config.scale_format, config.backend) == ("fp8", "ue8m0", "reference")


def test_a_backend_that_cannot_run_is_an_error_at_start() -> None:
    if torch.cuda.is_available():
        pytest.skip("the torch backend runs here")
    with pytest.raises(RuntimeError, match="SM90"):
        converted_model("llama3", "--blockwise_fp8.gemm", "torch")


def test_the_converter_without_our_config_module_says_what_to_set() -> None:
    with pytest.raises(ValueError, match="custom_config_module"):
        BlockwiseFP8Converter(JobConfig(), dims())


@pytest.mark.parametrize(
    ("overrides", "degrees", "key"),
    [
        (["--training.enable_cpu_offload"], {"dp_shard": 2}, "enable_cpu_offload"),
        (["--fault_tolerance.enable"], {"dp_shard": 2}, "fault_tolerance"),
        (["--optimizer.early_step_in_backward"], {"dp_shard": 2}, "early_step_in_backward"),
        ([], {"dp_replicate": 2}, "data_parallel_replicate_degree"),
        (
            ["--parallelism.enable_async_tensor_parallel"],
            {"dp_shard": 2, "tp": 2},
            "enable_async_tensor_parallel",
        ),
        *(
            (
                ["--parallelism.pipeline_parallel_schedule", schedule],
                {"dp_shard": 2, "pp": 2},
                schedule,
            )
            for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        ),
        (
            ["--parallelism.pipeline_parallel_schedule_csv", "schedule.csv"],
            {"dp_shard": 2, "pp": 2},
            "pipeline_parallel_schedule_csv",
        ),
    ],
)
def test_what_does_not_work_is_refused_by_name(
    overrides: list[str], degrees: dict[str, int], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        refuse_unsupported(job_config("llama3", *overrides), dims(**degrees))


def test_pinned_asynchronous_saves_are_refused_without_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pinned = ("--checkpoint.enable", "--checkpoint.async_mode", "async_with_pinned_mem")
    with pytest.raises(ValueError, match=r'\[checkpoint\] async_mode .* Set it to "async"'):
        refuse_unsupported(job_config("llama3", *pinned), dims())


@pytest.mark.parametrize(
    "degrees", [{}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4, "cp": 2}]
)
def test_what_works_is_not_refused(degrees: dict[str, int]) -> None:
    refuse_unsupported(job_config("llama3"), dims(**degrees))
