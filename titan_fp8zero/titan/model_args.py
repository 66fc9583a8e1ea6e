"""The model arguments that a config names."""

import copy
from typing import Any

from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec

from titan_fp8zero.job import BadInput


def model_args_of(config: Any, spec: TrainSpec) -> BaseModelArgs:
    """Those of `[model] flavor`, as the trainer completes them from TorchTitan's JobConfig.

    Raises BadInput for a flavor that there is not.
    """
    flavor = config.model.flavor
    if flavor not in spec.model_args:
        raise BadInput(
            f"[model] flavor of {config.model.name} must be one of {', '.join(spec.model_args)}, "
            f"got {flavor!r}"
        )
    args = copy.deepcopy(spec.model_args[flavor])
    args.update_from_config(config)
    return args
