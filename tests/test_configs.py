from pathlib import Path

import pytest
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.train_spec import get_train_spec

import titan_fp8zero.titan  # noqa: F401  (registers train specs and datasets)

CONFIGS = sorted((Path(__file__).parents[1] / "train_configs").glob("*.toml"))
BASELINES = [config for config in CONFIGS if config.stem.endswith("_baseline")]


def parse(path, *overrides):
    return ConfigManager().parse_args(["--job.config_file", str(path), *overrides])


def test_all_configs_are_there():
    assert [config.stem for config in CONFIGS] == [
        "deepseek_v3_16b",
        "deepseek_v3_671b_pp8_ep32_dp2",
        "deepseek_v3_671b_pp8_ep32_dp8",
        "deepseek_v3_baseline",
        "deepseek_v3_debug",
        "llama3_8b",
        "llama3_baseline",
        "llama3_debug",
        "qwen3_baseline",
        "qwen3_debug",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_names_things_that_exist(path):
    config = parse(path)
    spec = get_train_spec(config.model.name)
    assert config.model.flavor in spec.model_args
    assert config.training.dataset in DATASETS
    assert config.experimental.custom_import == "titan_fp8zero.titan"
    assert config.blockwise_fp8.strategy == "block"
    assert config.job.dump_folder == f"./outputs/{path.stem}"
    if config.validation.enable:
        assert spec.build_validator_fn is not None
        assert config.validation.dataset in DATASETS
    assert config.model.converters == ([] if path in BASELINES else ["blockwise_fp8"])


@pytest.mark.parametrize("baseline", BASELINES, ids=lambda path: path.stem)
def test_baseline_differs_in_fp8_alone(baseline):
    stock = parse(baseline).to_dict()
    ours = parse(baseline.with_stem(baseline.stem.replace("_baseline", "_debug"))).to_dict()
    differing = {
        f"{section}.{key}"
        for section in stock
        for key in stock[section]
        if stock[section][key] != ours[section][key]
    }
    assert differing == {
        "job.config_file",
        "job.description",
        "job.dump_folder",
        "model.converters",
        "optimizer.name",
    }
    assert stock["optimizer"]["name"] == "AdamW"


def test_our_table_is_read(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[job]\ncustom_config_module = "titan_fp8zero.titan.config"\n'
        '[blockwise_fp8]\nscale_format = "ue8m0"\nfqns = ["layers.*.attention.*"]\n'
    )
    config = parse(path, "--blockwise_fp8.strategy", "param")
    assert config.blockwise_fp8.scale_format == "ue8m0"
    assert config.blockwise_fp8.fqns == ["layers.*.attention.*"]
    assert config.blockwise_fp8.strategy == "param"


def test_unknown_key_in_our_table_is_named(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[job]\ncustom_config_module = "titan_fp8zero.titan.config"\n'
        '[blockwise_fp8]\nstratgy = "block"\n'
    )
    with pytest.raises(ValueError, match=r"Invalid field names.*BlockwiseFP8.*stratgy"):
        parse(path)


def test_untied_qwen3_flavor_differs_from_stock_in_tying_alone():
    flavors = get_train_spec("qwen3").model_args
    untied, tied = flavors["debugmodel_untied"], flavors["debugmodel"]
    assert not untied.enable_weight_tying and tied.enable_weight_tying
    untied_options = {k: v for k, v in vars(untied).items() if k != "enable_weight_tying"}
    assert untied_options.items() <= vars(tied).items()
