"""`config.json` of Hugging Face's architectures, derived from TorchTitan's model arguments.

Fields are those of the models' published configs, which transformers, vLLM and SGLang all read.
"""

from typing import Any

import torch
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.model import BaseModelArgs

from titan_fp8zero.blocks import BLOCK, ScaleFormat


class Inexpressible(ValueError):
    """A model that Hugging Face's architecture cannot compute; the message lists every reason."""


def hf_config(
    args: BaseModelArgs, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, Any]:
    """The config of a model with these arguments and weight shapes, by FQN; `dtype` of its values.

    Raises Inexpressible.
    """
    if isinstance(args, TransformerModelArgs):
        fields = _llama3(args, shapes)
    elif isinstance(args, Qwen3ModelArgs):
        fields = _qwen3(args)
    elif isinstance(args, DeepSeekV3ModelArgs):
        fields = _deepseek_v3(args)
    else:
        raise Inexpressible(
            f"no Hugging Face config is known for a model with {type(args).__name__}: there are "
            "those of llama3, qwen3 and deepseek_v3"
        )
    return {
        **fields,
        "vocab_size": shapes["tok_embeddings.weight"][0],
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "rms_norm_eps": args.norm_eps,
        "rope_theta": args.rope_theta,
        "max_position_embeddings": args.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Tokenizers know them; null, because transformers would take 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def quantization_config(not_converted: list[str], scale_format: ScaleFormat) -> dict[str, Any]:
    """DeepSeek-V3's `quantization_config`, and which linear modules are not in FP8."""
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": not_converted,
    }
    return config | ({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {})


def _llama3(args: TransformerModelArgs, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    scaling = args.rope_scaling_args
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": args.dim // args.n_heads,
        "intermediate_size": shapes["layers.0.feed_forward.w1.weight"][0],
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
    }


def _qwen3(args: Qwen3ModelArgs) -> dict[str, Any]:
    moe = args.moe_args
    reasons = [(not args.qk_norm, "qk_norm = False: Qwen3 normalizes queries and keys")]
    if args.moe_enabled:
        reasons += [
            *_reasons_of_experts(moe),
            (moe.score_func != "softmax", f"score_func = {moe.score_func!r}: Qwen3 has softmax"),
            (moe.num_shared_experts > 0, "num_shared_experts: Qwen3 has none"),
            (moe.route_scale != 1.0, "route_scale: Qwen3 has none"),
            (moe.num_expert_groups is not None, "num_expert_groups: Qwen3 has none"),
        ]
    _refuse(reasons)
    fields: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "intermediate_size": args.hidden_dim,
        "tie_word_embeddings": args.enable_weight_tying,
        "use_sliding_window": False,
    }
    if not args.moe_enabled:
        return fields
    return fields | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": args.moe_inter_dim,
        "norm_topk_prob": moe.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v3(args: DeepSeekV3ModelArgs) -> dict[str, Any]:
    # One thing differs: TorchTitan's last norm has an epsilon of 1.2e-7, not `norm_eps`.
    moe = args.moe_args
    _refuse(_reasons_of_experts(moe))
    fields: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": args.n_heads,
        "intermediate_size": args.inter_dim,
        "moe_intermediate_size": args.moe_inter_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.num_expert_groups or 1,
        "topk_group": moe.num_limited_groups or 1,
        "topk_method": "noaux_tc",
        "scoring_func": moe.score_func,
        "norm_topk_prob": moe.route_norm,
        "routed_scaling_factor": moe.route_scale,
        "first_k_dense_replace": args.n_dense_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "tie_word_embeddings": False,
    }
    if args.max_seq_len <= args.original_seq_len:
        return fields
    # TorchTitan scales the softmax and not the rotary embedding: the two factors are then equal.
    return fields | {
        "rope_scaling": {
            "type": "yarn",
            "factor": args.rope_factor,
            "original_max_position_embeddings": args.original_seq_len,
            "beta_fast": args.beta_fast,
            "beta_slow": args.beta_slow,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale,
        }
    }


def _reasons_of_experts(moe: MoEArgs) -> list[tuple[bool, str]]:
    return [
        (moe.score_before_experts, "score_before_experts: scores multiply what experts return"),
        (moe.gate_bias, "gate_bias: router gates have none"),
    ]


def _refuse(reasons: list[tuple[bool, str]]) -> None:
    if found := [reason for holds, reason in reasons if holds]:
        raise Inexpressible(
            "\n  ".join(["Hugging Face's architecture cannot express this model:", *found])
        )
