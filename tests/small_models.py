"""Debug models with fewer layers: what trainer runs test is the same, in half the time."""

LAYERS = {"qwen3": 2, "deepseek_v3": 3}


def debug_model_args() -> dict[str, list]:
    """TorchTitan's and our debug flavors, by model."""
    from torchtitan.protocols.train_spec import get_train_spec

    import titan_fp8zero.titan  # noqa: F401  registers our flavors

    return {
        name: [
            args
            for flavor, args in get_train_spec(name).model_args.items()
            if flavor.startswith("debugmodel")
        ]
        for name in LAYERS
    }


def shrink_debug_models() -> None:
    """For the rest of the process."""
    for name, flavors in debug_model_args().items():
        for args in flavors:
            args.n_layers = LAYERS[name]
