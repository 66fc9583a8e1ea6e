"""ZeRO-1 for blockwise FP8 training: FP8 compute weights, fp32 main parameters sharded by tiles."""

from titan_fp8zero.blocks import dequantize_blockwise, fold, quantize_blockwise, unfold
from titan_fp8zero.clip import clip_grad_norm_
from titan_fp8zero.experts import BlockwiseFP8GroupedExperts
from titan_fp8zero.linear import BlockwiseFP8Linear
from titan_fp8zero.optimizer import BlockwiseAdamW
from titan_fp8zero.placement import BlockShard
from titan_fp8zero.rollout import iter_fp8_weights
from titan_fp8zero.zero1 import Zero1, shard_zero1

__all__ = [
    "BlockShard",
    "BlockwiseAdamW",
    "BlockwiseFP8GroupedExperts",
    "BlockwiseFP8Linear",
    "Zero1",
    "clip_grad_norm_",
    "dequantize_blockwise",
    "fold",
    "iter_fp8_weights",
    "quantize_blockwise",
    "shard_zero1",
    "unfold",
]
