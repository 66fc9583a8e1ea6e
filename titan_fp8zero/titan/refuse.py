"""What blockwise FP8 ZeRO-1 does not do, refused by name before training starts."""

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims


def refuse_unsupported(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raises ValueError that names the config key, the reason, and what to do."""
    reasons = [
        (
            job_config.training.enable_cpu_offload,
            "[training] enable_cpu_offload",
            "main parameters are updated and quantized on the device. Set it to false",
        ),
        (
            job_config.fault_tolerance.enable,
            "[fault_tolerance] enable",
            "torchft replicas would publish different weights. Set it to false",
        ),
        (
            job_config.optimizer.early_step_in_backward,
            "[optimizer] early_step_in_backward",
            "a step needs the gradient norm that all ranks agree on. Set it to false",
        ),
        (
            parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled,
            "[parallelism] data_parallel_replicate_degree",
            "without a shard degree over 1 there is nothing to shard. Set "
            "data_parallel_shard_degree = -1 and data_parallel_replicate_degree = 1",
        ),
        (
            parallel_dims.tp_enabled,
            "[parallelism] tensor_parallel_degree",
            "tensor-parallel shards are not folded into tiles. Set it to 1",
        ),
        (
            parallel_dims.pp_enabled,
            "[parallelism] pipeline_parallel_degree",
            "reductions are not counted over pipeline micro-batches. Set it to 1",
        ),
    ]
    reasons += [
        (
            job_config.checkpoint.enable and getattr(job_config.checkpoint, key),
            f"[checkpoint] {key}",
            "Hugging Face adapters reshape whole tensors. Set it to false",
        )
        for key in ("last_save_in_hf", "initial_load_in_hf")
    ]
    for is_set, key, reason in reasons:
        if is_set:
            raise ValueError(f"{key} does not work with the blockwise_fp8 converter: {reason}")
