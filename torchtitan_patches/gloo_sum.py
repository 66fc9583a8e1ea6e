"""Makes FSDP2 reduce gradients by a plain sum, which gloo can do.

TorchTitan sets FSDP2's gradient divide factor to 1, and FSDP2 then asks for the reduce operation
PREMUL_SUM, which only NCCL has. Multiplying by 1 and summing is summing: the same result.
"""

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_patches.guard import check_callable, check_versions, is_applied, log_applied, mark

NAME = "gloo_sum"


def apply() -> None:
    """Replaces `disable_fsdp_gradient_division` where llama3 and llama4 bind it; qwen3 and
    deepseek_v3 use theirs."""
    import torchtitan.models.llama3.infra.parallelize as llama3
    import torchtitan.models.llama4.infra.parallelize as llama4

    name = "disable_fsdp_gradient_division"
    if is_applied(NAME, getattr(llama3, name, None)):
        return
    check_versions(NAME)
    check_callable(NAME, FSDPModule, "set_force_sum_reduction_for_comms", ("self", "enable"))
    check_callable(NAME, llama4, name, ("model",))
    disable_division = check_callable(NAME, llama3, name, ("model",))

    def disable_division_and_sum(model: nn.Module) -> None:
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    for module in (llama3, llama4):
        setattr(module, name, mark(NAME, disable_division_and_sum))
    log_applied(NAME, "FSDP2 reduces gradients by a plain sum")
