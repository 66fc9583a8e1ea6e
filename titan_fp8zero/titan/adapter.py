"""TorchTitan's state-dict adapters, for `[checkpoint] last_save_in_hf` and `initial_load_in_hf`."""

from typing import Any

from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_fp8zero.checkpoint import WeightView


def adapter_of_views(stock: type[BaseStateDictAdapter]) -> type[BaseStateDictAdapter]:
    """An adapter that hands the stock one the DTensors that FSDP2 would have, in place of views.

    Stock adapters permute rows and split experts, of DTensors as FSDP2 shards them. Those that are
    loaded are taken by the model's `load_state_dict`.
    """

    class AdapterOfViews(stock):  # type: ignore[misc, valid-type]
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return super().to_hf(
                {
                    fqn: value.to_parameter() if isinstance(value, WeightView) else value
                    for fqn, value in state_dict.items()
                }
            )

    return AdapterOfViews
