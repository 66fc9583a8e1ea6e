"""Runs TorchTitan's trainer several times in one set of gloo ranks, and writes down what came out.

    python -m torch.distributed.run --nproc_per_node 2 tests/trainer_runs.py RUNS.json RESULTS.json

A run is {"name", "args", "poison_step", "layout_only"}: `args` are TorchTitan's; at `poison_step`
the last rank's gradients become NaN; `layout_only` builds the model and does not train it. One
process for all runs, because importing torch takes longer than a run.
"""

import gc
import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import shrink_debug_models

import torchtitan_patches

torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)

import torchtitan.train  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.model_converter import register_model_converter  # noqa: E402
from torchtitan.tools.logging import init_logger, logger  # noqa: E402

from titan_fp8zero.blocks import unfold  # noqa: E402
from titan_fp8zero.main_parameter import local_tensor  # noqa: E402
from titan_fp8zero.titan.converter import BlockwiseFP8Converter  # noqa: E402

# Under this name stock FSDP2 stays: it gathers fp32 weights, and each forward quantizes them.
register_model_converter(BlockwiseFP8Converter, "quantize_in_forward")

LOG_FORMAT = {"loss": "{:8.5f}", "grad_norm": "{:7.4f}"}  # as TorchTitan prints them


def run(
    name: str,
    args: list[str],
    dump_folder: Path,
    poison_step: int = 0,
    layout_only: bool = False,
) -> dict[str, Any]:
    """Train once; returns printed losses and norms, hashes of the initial weights, and buckets."""
    torch._dynamo.reset()
    config = ConfigManager().parse_args(
        [*args, "--job.dump_folder", str(dump_folder / name), "--metrics.log_freq", "1"]
    )
    trainer = torchtitan.train.Trainer(config)
    result: dict[str, Any] = {"buckets": buckets_of_ranks(trainer)}
    if layout_only:
        trainer.close()
        return result
    result["initial"] = initial_weights(trainer)
    if poison_step:
        result["skipped"] = train_with_poison(trainer, poison_step)
    else:
        trainer.train()
    trainer.close()
    dist.barrier()  # under pipeline parallelism another rank writes the metrics
    if dist.get_rank() == 0:
        lines = (dump_folder / name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        trained = [step for step in steps if "loss" in step]
        result["printed"] = [[printed(step, key) for key in LOG_FORMAT] for step in trained]
        result["losses"] = [step["loss"] for step in trained]
    return result


def buckets_of_ranks(trainer: Any) -> list[list[dict[str, Any]]]:
    """What `shard_zero1` laid out, by rank."""
    zero1s = getattr(trainer.optimizers, "zero1s", [])
    mine = [describe(bucket) for zero1 in zero1s for bucket in zero1._mains_of]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return of_ranks


def describe(bucket: Any) -> dict[str, Any]:
    gradient = bucket._empty_gradient()
    bucket._ring.give_back(bucket, gradient)
    return {
        "num_ranks": bucket.layout.num_ranks,
        "units_per_rank": bucket.layout.units_per_rank,
        "mains": [
            [[m.weight.fqn, m.start, m.weight.units] for m in main.members]
            for main in bucket.layout.mains
        ],
        "bytes": {
            "gradient": gradient.nbytes,
            "main": bucket.main.nbytes,
            "payload": bucket._payload.nbytes,
        },
    }


def printed(step: dict[str, Any], key: str) -> str:
    return "not finite" if step[key] is None else LOG_FORMAT[key].format(step[key])


def initial_weights(trainer: Any) -> dict[str, str]:
    """Hashes of the whole weights, in their own shapes, by FQN."""
    zero1s = getattr(trainer.optimizers, "zero1s", [])
    if zero1s:
        weights = [weight for zero1 in zero1s for weight in zero1._weights]
        whole = {w.fqn: whole_weight(w) for w in weights if not w.mesh.model_parallel}
    else:
        named = trainer.model_parts[0].named_parameters()
        whole = {
            name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): (
                p.full_tensor() if hasattr(p, "full_tensor") else p
            )
            for name, p in named
        }
    return {
        fqn: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        for fqn, tensor in whole.items()
    }


def whole_weight(weight: Any) -> torch.Tensor:
    parameter = weight.main.parameter.detach()
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    units = full[weight.member.start : weight.member.start + weight.member.weight.units]
    return unfold(units, weight.shape) if weight.is_fp8 else units.view(weight.shape)


def train_with_poison(trainer: Any, poison_step: int) -> dict[str, Any]:
    """Make the last rank's gradients NaN at a step; whether that step changed any state."""
    (zero1,) = trainer.optimizers.zero1s
    leaf = zero1._weights[-1].leaf
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.nan if is_last_rank and trainer.step == poison_step else gradient

    leaf.register_hook(poison)
    before: list[torch.Tensor] = []
    unchanged: list[bool] = []
    train_step = trainer.train_step

    def watched_step(data: Any) -> None:
        if trainer.step == poison_step:
            before.extend(tensor.clone() for tensor in state(trainer))
        train_step(data)
        if trainer.step == poison_step:
            after = state(trainer)
            unchanged.extend(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    trainer.train_step = watched_step
    trainer.train()
    return {"count": zero1.skipped_steps, "unchanged": all(unchanged), "tensors": len(unchanged)}


def state(trainer: Any) -> list[torch.Tensor]:
    """All that a skipped step must not change: main parameters, moments, codes, scales, biases."""
    (zero1,) = trainer.optimizers.zero1s
    zero1.wait_for_publish()
    tensors = [local_tensor(parameter.detach()) for parameter in zero1.main_parameters]
    for optimizer in trainer.optimizers:
        for moments in optimizer.state.values():
            tensors.extend(local_tensor(value) for value in moments.values())
    for weight in zero1._weights:
        if weight.is_fp8:
            tensors.extend([weight.compute.codes.view(torch.uint8), weight.compute.scale_inv])
        else:
            tensors.append(local_tensor(weight.compute.detach()))
    named = trainer.model_parts[0].named_buffers()
    tensors.extend(buffer for name, buffer in named if name.endswith("expert_bias"))
    return tensors


def main() -> None:
    init_logger()
    logger.setLevel(logging.ERROR)
    torchtitan.train.time.sleep = lambda seconds: None
    shrink_debug_models()
    runs = json.loads(Path(sys.argv[1]).read_text())
    results_file = Path(sys.argv[2])
    results = {}
    for spec in runs:
        name = spec["name"]
        options = {key: spec[key] for key in ("poison_step", "layout_only") if key in spec}
        results[name] = run(name, spec["args"], results_file.parent, **options)
        gc.collect()  # TorchTitan has switched it off
        dist.barrier()
    if dist.get_rank() == 0:
        results_file.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
