"""Makes the checkpoints of main parameters complete or absent, and checked before they are loaded.

The trainer makes its `CheckpointManager` by that name, which it has imported before any plug-in of
ours; and the manager passes DCP no storage writer. `CheckpointManager(...)` therefore gives an
instance of our subclass where the optimizers are of main parameters, where the checkpoint is a seed
for such (a single process shards nothing), and where checkpoints are to be signed.
"""

from typing import Any

from torchtitan_patches.guard import (
    check_callable,
    check_versions,
    is_applied,
    log_applied,
    mark,
    refuse,
)

NAME = "checkpoint_manager"
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "dcp_save": (
        "self",
        "state_dict",
        "checkpoint_id",
        "async_mode",
        "enable_garbage_collection",
        "to_hf",
    ),
    "dcp_load": ("self", "state_dict", "checkpoint_id", "from_hf", "from_quantized"),
    "load": ("self", "step"),
    "close": ("self",),
    "_find_load_step": ("self", "folder"),
    "_async_wait": ("self",),
    "_purge_stale_checkpoints": ("self",),
    "_create_checkpoint_id": ("self", "step", "folder"),
}
"""Methods that the subclass overrides or calls, with what they take."""


def apply() -> None:
    """Replaces `CheckpointManager.__new__`; all other runs get the stock manager."""
    from torchtitan.components.checkpoint import CheckpointManager

    from titan_fp8zero.titan.checkpoint_manager import CheckedCheckpointManager
    from titan_fp8zero.titan.container import MainParameterOptimizers

    if is_applied(NAME, CheckpointManager.__new__):
        return
    check_versions(NAME)
    for name, parameters in OVERRIDDEN.items():
        check_callable(NAME, CheckpointManager, name, parameters)
    if CheckpointManager.__new__ is not object.__new__:
        refuse(NAME, "CheckpointManager has a __new__ of its own")

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("checkpoint_config")
        is_ours = (
            isinstance(kwargs.get("optimizers"), MainParameterOptimizers)
            or getattr(config, "create_seed_checkpoint", False)
            or getattr(config, "key_file", "")
        )
        if cls is CheckpointManager and is_ours:
            cls = CheckedCheckpointManager
        return object.__new__(cls)

    CheckpointManager.__new__ = mark(NAME, new)  # type: ignore[method-assign]
    log_applied(NAME, "checkpoints of main parameters are complete or absent, and checked")
