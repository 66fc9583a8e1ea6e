"""The model that a TorchTitan config trains, and Hugging Face's names for its weights."""

import importlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8zero.job import BadInput
from titan_fp8zero.model_spec import Entry, ModelSpec
from titan_fp8zero.titan.config import BlockwiseFP8, options_of
from titan_fp8zero.titan.converter import CONVERTER, convertible_modules, select_fqns, weights_of
from titan_fp8zero.titan.model_args import model_args_of


@dataclass(frozen=True)
class HFModel:
    """The model that a config trains, on the meta device."""

    config: Any
    """TorchTitan's JobConfig."""
    args: BaseModelArgs
    module: nn.Module
    adapter: Any
    """TorchTitan's StateDictAdapter."""

    @classmethod
    def of(cls, config: Any) -> "HFModel":
        """Raises BadInput for a model that TorchTitan or Hugging Face does not know."""
        if config.experimental.custom_import:
            importlib.import_module(config.experimental.custom_import)
        name = config.model.name
        try:
            train_spec = get_train_spec(name)
        except ValueError as error:
            raise BadInput(f"[model] name: {error}") from None
        if train_spec.state_dict_adapter is None:
            raise BadInput(f"[model] name: TorchTitan has no Hugging Face names for {name!r}")
        args: Any = model_args_of(config, train_spec)
        with torch.device("meta"):
            module: Any = train_spec.model_cls(args)
        return cls(config, args, module, train_spec.state_dict_adapter(args, None))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of high-precision parameters in training."""
        return TORCH_DTYPE_MAP[self.config.training.mixed_precision_param]

    @property
    def options(self) -> BlockwiseFP8 | None:
        """The `[blockwise_fp8]` table; None where training does not go by it."""
        return options_of(self.config) if CONVERTER in self.config.model.converters else None

    @property
    def fp8_modules(self) -> list[str]:
        """FQNs of the modules that train in FP8."""
        candidates = convertible_modules(self.module)
        return [] if self.options is None else select_fqns(candidates, self.options.fqns)

    def spec(self, fp8_modules: list[str], dtype: torch.dtype) -> ModelSpec:
        """The state dict, with the weights of these modules in FP8, other parameters in `dtype`."""
        modules = convertible_modules(self.module)
        fp8 = {f"{fqn}.{name}" for fqn in fp8_modules for name in weights_of(modules[fqn])}
        parameters = {fqn for fqn, _ in self.module.named_parameters()}

        def entry(fqn: str, tensor: torch.Tensor) -> Entry:
            exported = torch.float8_e4m3fn if fqn in fp8 else dtype
            return Entry(tuple(tensor.shape), exported if fqn in parameters else tensor.dtype)

        state = self.module.state_dict()
        entries = {fqn: entry(fqn, tensor) for fqn, tensor in state.items() if fqn not in self.tied}
        return ModelSpec(entries, self.tied, self.adapter.to_hf)

    @cached_property
    def tied(self) -> dict[str, str]:
        """Further FQNs of tied weights, and the first of each."""
        first: dict[int, str] = {}
        named = list(self.module.named_parameters(remove_duplicate=False))
        return {fqn: name for fqn, p in named if (name := first.setdefault(id(p), fqn)) != fqn}

    @cached_property
    def names_without_weight(self) -> re.Pattern[str]:
        """Hugging Face names that have nothing to import: tied weights and rotary tables."""
        templates = [
            name
            for name, fqn in self.adapter.from_hf_map.items()
            if fqn is None or fqn in self.tied
        ]
        return re.compile("|".join(re.escape(name).replace(r"\{\}", r"\d+") for name in templates))

    def unconverted_hf_modules(self, fp8_modules: list[str]) -> list[str]:
        """Hugging Face's names of the linear modules that are not among these."""
        others = [fqn for fqn in convertible_modules(self.module) if fqn not in fp8_modules]
        spec = self.spec(others, torch.float32)
        tied = [name for name, fqn in self.adapter.from_hf_map.items() if fqn in self.tied]
        weights = [tensor.name for tensor in spec.hf_tensors if spec.entries[tensor.fqn].is_fp8]
        return [name.removesuffix(".weight") for name in [*weights, *tied]]
