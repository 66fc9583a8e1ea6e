"""What blockwise FP8 ZeRO-1 does not do, refused by name before training starts."""

import torch
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

SPLIT_BACKWARD_SCHEDULES = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


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
            job_config.parallelism.enable_async_tensor_parallel,
            "[parallelism] enable_async_tensor_parallel",
            "Inductor finds no GEMM to pipeline in opaque FP8 ones. Set it to false",
        ),
        (
            parallel_dims.pp_enabled
            and job_config.parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES,
            f'[parallelism] pipeline_parallel_schedule = "'
            f'{job_config.parallelism.pipeline_parallel_schedule}"',
            "it splits backward in two, and gradients of weights would arrive outside of it. Use "
            '"1F1B" or "Interleaved1F1B"',
        ),
        (
            parallel_dims.pp_enabled and job_config.parallelism.pipeline_parallel_schedule_csv,
            "[parallelism] pipeline_parallel_schedule_csv",
            "it may split backward in two. Remove it and name a schedule",
        ),
    ]
    reasons.append(
        (
            job_config.checkpoint.enable
            and job_config.checkpoint.async_mode == "async_with_pinned_mem"
            and not torch.cuda.is_available(),
            '[checkpoint] async_mode = "async_with_pinned_mem"',
            'memory is pinned for GPUs, and there is none. Set it to "async"',
        )
    )
    for is_set, key, reason in reasons:
        if is_set:
            raise ValueError(f"{key} does not work with the blockwise_fp8 converter: {reason}")
