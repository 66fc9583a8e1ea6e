"""TorchTitan's train specs with our parts in them, under TorchTitan's own model names.

A config without the `blockwise_fp8` converter trains exactly as stock TorchTitan does: baselines
run through the same specs.
"""

from dataclasses import replace
from functools import cache
from types import ModuleType

import torchtitan.models.deepseek_v3.infra.parallelize as deepseek_v3
import torchtitan.models.llama3.infra.parallelize as llama3
import torchtitan.models.qwen3.infra.parallelize as qwen3
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec

from titan_fp8zero.titan.adapter import adapter_of_views
from titan_fp8zero.titan.converter import CONVERTER, BlockwiseFP8Converter
from titan_fp8zero.titan.metrics import build_metrics_processor
from titan_fp8zero.titan.optimizers import build_optimizers_with
from titan_fp8zero.titan.parallelize import parallelize_with
from titan_fp8zero.titan.text import build_text_dataloader, build_tokenizer

MODELS: dict[str, ModuleType] = {"llama3": llama3, "qwen3": qwen3, "deepseek_v3": deepseek_v3}
"""The models we train, and the module of each that calls `apply_fsdp`."""


@cache  # TorchTitan refuses a second registration of a name
def register_train_specs() -> None:
    """Registers our train spec for each of `MODELS`; TorchTitan prefers it to its own."""
    register_model_converter(BlockwiseFP8Converter, CONVERTER)
    for name in MODELS:
        register_train_spec(name, _with_our_parts(name, get_train_spec(name)))


def _with_our_parts(name: str, stock: TrainSpec) -> TrainSpec:
    assert stock.state_dict_adapter is not None
    return replace(
        stock,
        parallelize_fn=parallelize_with(stock.parallelize_fn, MODELS[name]),
        build_optimizers_fn=build_optimizers_with(stock.build_optimizers_fn),
        model_args={**stock.model_args, **_extra_flavors(name, stock)},
        build_tokenizer_fn=build_tokenizer,
        build_dataloader_fn=build_text_dataloader,
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=adapter_of_views(stock.state_dict_adapter),
    )


def _extra_flavors(name: str, stock: TrainSpec) -> dict[str, BaseModelArgs]:
    if name != "qwen3":
        return {}
    # Stock FSDP2 refuses qwen3's debugmodel on torch 2.13, since its embedding and head are tied.
    tied = stock.model_args["debugmodel"]
    return {"debugmodel_untied": replace(tied, enable_weight_tying=False)}  # type: ignore[call-arg]
