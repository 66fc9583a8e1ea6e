"""Loads, trains and saves with TorchTitan's trainer several times in one set of gloo ranks.

    python -m torch.distributed.run --nproc_per_node 2 tests/checkpoint_runs.py RUNS RESULTS

Both are JSON files. A run is {"name", "args", "save_as"}: `args` are TorchTitan's, and its
checkpoints go to a folder `name`. With `save_as` it saves what it has loaded as that step,
otherwise it trains. One process for all runs, because importing torch takes longer than a run.
"""

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_patches

torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)

import torchtitan.train  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.tools.logging import init_logger, logger  # noqa: E402


class WatchedTrainer(torchtitan.train.Trainer):
    """Keeps what a test asks for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.losses: list[float] = []

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**kwargs)
        self.losses.append(loss.item())
        return loss

    def hash_compute_weights(self) -> dict[str, str]:
        """Of codes and scales, or values: what forward reads."""
        for zero1 in getattr(self.optimizers, "zero1s", []):
            zero1.wait_for_publish()
        found: dict[str, str] = {}
        for module_name, module in self.model_parts[0].named_modules():
            for name, compute in module.__dict__.get("_compute_weights", {}).items():
                for part in compute[:2] if isinstance(compute, tuple) else [compute.detach()]:
                    content = part.contiguous().view(torch.uint8).numpy().tobytes()
                    key = f"{module_name}.{name}"
                    found[key] = found.get(key, "") + hashlib.sha256(content).hexdigest()
        return found


def run(args: list[str], save_as: int | None) -> dict[str, Any]:
    config = ConfigManager().parse_args([*args, "--checkpoint.enable"])
    trainer = WatchedTrainer(config)
    if save_as is None:
        trainer.train()
    else:
        trainer.checkpointer.load(step=config.checkpoint.load_step)
        trainer.checkpointer.save(save_as, last_step=True)
    trainer.close()
    return {
        "step": trainer.step,
        "losses": trainer.losses,
        "compute_weights": trainer.hash_compute_weights(),
    }


def main() -> None:
    init_logger()
    logger.setLevel(logging.ERROR)
    torchtitan.train.time.sleep = lambda seconds: None
    runs, results_file = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {}
    for spec in runs:
        folder = str(results_file.parent / spec["name"])
        results[spec["name"]] = run(
            [*spec["args"], "--job.dump_folder", folder], spec.get("save_as")
        )
        dist.barrier()
    if dist.get_rank() == 0:
        results_file.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
