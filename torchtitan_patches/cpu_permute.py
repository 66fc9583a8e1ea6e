"""Sorts tokens by expert on CPUs without the Triton kernel.

Expert parallelism fills a table of token indices by a Triton kernel, which needs a GPU. TorchTitan
has the same function in PyTorch, written as the kernel's reference; it reads numbers out of
tensors, so it is wrapped as one opaque operator for `torch.compile`.
"""

import torch
from torch import Tensor

from torchtitan_patches.guard import check_callable, check_versions, is_applied, log_applied, mark

NAME = "cpu_permute"

_PARAMETERS = (
    "tokens_per_expert_group",
    "start_index_values",
    "write_offsets",
    "experts_per_rank",
    "num_ranks",
    "max_len",
)


def apply() -> None:
    """Replaces `fill_indices_wrapper`, which launches the kernel."""
    import torchtitan.models.moe.kernels as kernels

    name = "fill_indices_wrapper"
    if is_applied(NAME, getattr(kernels, name, None)):
        return
    check_versions(NAME)
    check_callable(NAME, kernels, name, (*_PARAMETERS, "block_size", "max_blocks"))
    reference = check_callable(NAME, kernels, "fill_indices_cpu", _PARAMETERS)

    @torch.library.custom_op("torchtitan_patches::fill_indices", mutates_args=())
    def fill_indices(
        tokens_per_expert_group: Tensor,
        start_index_values: Tensor,
        write_offsets: Tensor,
        experts_per_rank: int,
        num_ranks: int,
        max_len: int,
    ) -> Tensor:
        return reference(
            tokens_per_expert_group,
            start_index_values,
            write_offsets,
            experts_per_rank,
            num_ranks,
            max_len,
        )

    @fill_indices.register_fake
    def _(tokens, starts, offsets, experts_per_rank, num_ranks, max_len):
        return tokens.new_empty(max_len, dtype=torch.int32)

    setattr(kernels, name, mark(NAME, fill_indices))
    log_applied(NAME, "tokens are sorted by expert without the Triton kernel")
