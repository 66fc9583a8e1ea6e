"""What every rank runs: TorchTitan's trainer, on GPUs as it is, on CPUs with the patches it needs.

    python -m torch.distributed.run --nproc_per_node 2 -m titan_fp8zero.launch \\
        --job.config_file train_configs/llama3_debug.toml
"""

import ctypes
import logging
import signal
import sys

import torch
from torch.distributed.elastic.multiprocessing.errors import record

import torchtitan_patches


def _end_with_parent() -> None:
    """Have the kernel end this rank when what started it is gone, killed even."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@record
def main() -> None:
    """Trains as the command line says, in TorchTitan's own syntax."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: end at once, without a traceback a rank
    # Until TorchTitan sets up logging itself: the patches are to be named in the log.
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stdout,
        format="[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s",
    )
    if not torch.cuda.is_available():
        # One of them decides on which device torchtitan is imported: nothing may import it before.
        torchtitan_patches.apply(torchtitan_patches.CPU_PATCHES)

    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    train(Trainer)


if __name__ == "__main__":
    main()
