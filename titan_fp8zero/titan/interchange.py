"""`titan-fp8zero export` and `import`: between DCP checkpoints and Hugging Face safetensors."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from titan_fp8zero.blocks import BLOCK
from titan_fp8zero.checkpoint_errors import CheckpointError
from titan_fp8zero.dcp_folder import DCPFolder
from titan_fp8zero.export import export_checkpoint
from titan_fp8zero.import_hf import import_checkpoint
from titan_fp8zero.job import BadInput
from titan_fp8zero.mismatch import Mismatch
from titan_fp8zero.model_spec import ModelSpec
from titan_fp8zero.safetensors_folder import CONFIG, SafetensorsFolder
from titan_fp8zero.sidecar import read_key
from titan_fp8zero.titan.hf_config import Inexpressible, hf_config, quantization_config
from titan_fp8zero.titan.hf_model import HFModel

logger = logging.getLogger("titan_fp8zero")

HEADS = ("num_attention_heads", "num_key_value_heads")
"""What configs have to agree on beyond shapes: heads cut rows, and Llama orders rows by them."""

COMPUTED = (
    *("rms_norm_eps", "rope_theta", "rope_scaling"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor"),
    *("scoring_func", "n_group", "topk_group"),
)
"""What else changes the values that the same weights compute."""


def export_model(
    checkpoint: Path, folder: Path, config: Any, *, as_bf16: bool, shard_bytes: int
) -> None:
    """Write the model of a DCP checkpoint, that a TorchTitan config trains, as a folder of Hugging
    Face safetensors: in FP8 as the config says, or all in bf16.

    Raises BadInput.
    """
    _check_free(folder)
    model = HFModel.of(config)
    fp8_modules = [] if as_bf16 else model.fp8_modules
    if not as_bf16 and not fp8_modules:
        raise BadInput("the config trains no module in FP8: export with --dtype bf16")
    dtype = torch.bfloat16 if as_bf16 else model.compute_dtype
    spec = model.spec(fp8_modules, dtype)
    quantization: dict[str, Any] = {}
    try:
        description = hf_config(model.args, spec.dcp_shapes, dtype)
        if fp8_modules:
            assert model.options is not None
            quantization["scale_format"] = model.options.scale_format
            quantization["round_main_to_bf16"] = model.options.main_round == "bf16"
            description["quantization_config"] = quantization_config(
                model.unconverted_hf_modules(fp8_modules), model.options.scale_format
            )
            _warn_of_tensor_parallel(model, spec)
        source = DCPFolder(checkpoint, _key(config))
        files = export_checkpoint(source, folder, spec, shard_bytes=shard_bytes, **quantization)
        for file in files:
            print(f"written {folder / file}")
        (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    except (Mismatch, Inexpressible, CheckpointError) as error:
        raise BadInput(str(error)) from None
    except (OSError, SafetensorError) as error:  # the latter where a disk is full
        raise BadInput(f"{folder} is not complete: {error}") from None
    if description.get("scoring_func") == "softmax":
        logger.warning(
            "%s has scoring_func softmax, which vLLM reads; DeepseekV3ForCausalLM of transformers "
            "computes sigmoid whatever it says",
            folder / CONFIG,
        )


def _warn_of_tensor_parallel(model: HFModel, spec: ModelSpec) -> None:
    """Tensor-parallel ranks quantize their shards; a file has the blocks of the whole weight."""
    ranks = model.config.parallelism.tensor_parallel_degree
    cut = [
        fqn
        for fqn, entry in spec.entries.items()
        if entry.is_fp8 and any(size % (ranks * BLOCK) for size in entry.shape[-2:])
    ]
    if ranks > 1 and cut:
        logger.warning(
            "quantized anew, where tensor_parallel_degree = %d has cut their blocks: %s",
            ranks,
            ", ".join(cut),
        )


def import_model(folder: Path, checkpoint: Path, config: Any) -> None:
    """Write a folder of Hugging Face safetensors as a DCP checkpoint of the model, weights only,
    that a TorchTitan config trains.

    Layers for multi-token prediction, which TorchTitan's models do not have, are left out and named
    in the log, and so is what the folder's config computes otherwise. Raises BadInput.
    """
    _check_free(checkpoint)
    model = HFModel.of(config)
    spec = model.spec([], torch.float32)
    try:
        source = SafetensorsFolder(folder)
        described = hf_config(model.args, spec.dcp_shapes, torch.float32)
        left_out = _prediction_layers(source, described["num_hidden_layers"])
        import_checkpoint(
            source,
            checkpoint,
            spec,
            config={key: described[key] for key in HEADS},
            key=_key(config),
            is_ignored=lambda name: bool(
                name.startswith(left_out) or model.names_without_weight.fullmatch(name)
            ),
        )
    except (Mismatch, Inexpressible, CheckpointError, OSError) as error:
        raise BadInput(str(error)) from None
    for key in COMPUTED:
        if key in source.config and key in described and source.config[key] != described[key]:
            logger.warning(
                "%s has %s %s, training computes with %s: the same weights give other values",
                *(folder / CONFIG, key, source.config[key], described[key]),
            )


def _key(config: Any) -> bytes | None:
    """What checkpoints are signed with, as in training."""
    key_file = getattr(config.checkpoint, "key_file", "")
    return read_key(key_file) if key_file else None


def _prediction_layers(source: SafetensorsFolder, num_layers: int) -> tuple[str, ...]:
    count = source.config.get("num_nextn_predict_layers") or 0
    prefixes = tuple(f"model.layers.{num_layers + index}." for index in range(count))
    for prefix in prefixes:
        logger.warning("%s* is left out: it predicts further tokens, in inference only", prefix)
    return prefixes


def _check_free(folder: Path) -> None:
    try:
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise BadInput(str(error)) from None
    if not is_free:
        raise BadInput(f"{folder} exists and is not an empty directory: name a new one")
