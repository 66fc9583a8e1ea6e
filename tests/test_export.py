"""Hugging Face safetensors out of checkpoints and in."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from hf_files import FP8, differing, same_bits, tensors_of
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from titan_fp8zero import cli, quantize_blockwise, safetensors_folder, shard_zero1
from titan_fp8zero.blocks import dequantize_blockwise, fold, unfold
from titan_fp8zero.checkpoint_errors import CheckpointError
from titan_fp8zero.dcp_folder import DCPFolder
from titan_fp8zero.export import export_checkpoint
from titan_fp8zero.hf_names import SCALE_SUFFIX
from titan_fp8zero.import_hf import import_checkpoint
from titan_fp8zero.job import parse_config
from titan_fp8zero.linear import BlockwiseFP8Linear
from titan_fp8zero.mismatch import Mismatch
from titan_fp8zero.model_spec import Entry, ModelSpec
from titan_fp8zero.rollout import iter_fp8_weights
from titan_fp8zero.safetensors_folder import CONFIG, INDEX, SafetensorsFolder
from titan_fp8zero.titan.converter import BlockwiseFP8Converter
from titan_fp8zero.titan.hf_config import Inexpressible, hf_config
from titan_fp8zero.titan.hf_model import HFModel

CONFIGS = Path(__file__).parents[1] / "train_configs"
SMALL_LLAMA = ("--training.seq_len", "64")


def config_of(name: str) -> Path:
    return CONFIGS / f"{name}_debug.toml"


def run(command: str, source: Path, target: Path, name: str, *options: str) -> int:
    return cli.main([command, str(source), str(target), "--config", str(config_of(name)), *options])


def hf_model(name: str, *overrides: str) -> HFModel:
    return HFModel.of(parse_config(config_of(name), list(overrides)))


def log_uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal values times a magnitude of its own for each block, from the smallest to large."""
    if len(shape) < 2:
        return torch.randn(shape, generator=generator)
    tiles = fold(torch.randn(shape, generator=generator))
    magnitudes = torch.empty(len(tiles), 1, 1).uniform_(-130, 60, generator=generator).exp2()
    return unfold(tiles * magnitudes, shape)


def save_log_uniform(model: HFModel, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = model.spec([], torch.float32).dcp_shapes
    state = {fqn: log_uniform(shape, generator) for fqn, shape in shapes.items()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def trained_model(model: HFModel, **sharding: Any) -> nn.Module:
    """The model as training holds it, with other than initial values."""
    torch.manual_seed(0)
    module: Any = type(model.module)(model.args)
    with torch.no_grad():
        module.init_weights(buffer_device=torch.device("cpu"))
    BlockwiseFP8Converter(model.config, ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)).convert(module)
    for name, buffer in module.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_()
    shard_zero1(module, None, compute_dtype=torch.float32, **sharding)
    return module


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[HFModel, nn.Module, Path, Path]:
    """The model, as it trains, its checkpoint, and the checkpoint's export."""
    folder = tmp_path_factory.mktemp("llama")
    model = hf_model("llama3", *SMALL_LLAMA)
    module = trained_model(model)
    dcp.save(module.state_dict(), checkpoint_id=folder / "step-1", no_dist=True)
    options = (*SMALL_LLAMA, "--shard-gb", "0.003")
    assert run("export", folder / "step-1", folder / "hf", "llama3", *options) == 0
    return model, module, folder / "step-1", folder / "hf"


# Export.


def test_files_and_index_are_those_of_hugging_face(llama):
    _, _, _, folder = llama
    index = json.loads((folder / INDEX).read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    numbers = range(1, len(files) + 1)
    assert len(files) > 2
    assert files == [f"model-0000{number}-of-0000{len(files)}.safetensors" for number in numbers]
    for file in files:
        assert (folder / file).stat().st_mode == (folder / INDEX).stat().st_mode  # as readable
        found = load_file(folder / file)
        assert found.keys() == {key for key, value in index["weight_map"].items() if value == file}
        assert sum(tensor.nbytes for tensor in found.values()) <= 3_000_000
    tensors = tensors_of(folder)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            scale = tensors[name + SCALE_SUFFIX]
            assert scale.shape == tuple(-(-size // 128) for size in tensor.shape)
            assert scale.dtype == torch.float32
            file = index["weight_map"][name]
            assert index["weight_map"][name + SCALE_SUFFIX] == file


def test_config_names_what_is_not_in_fp8(llama):
    model, _, _, folder = llama
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    attention = [fqn for fqn in model.fp8_modules if "feed_forward" not in fqn]
    others = model.unconverted_hf_modules(attention)
    assert {"lm_head", "model.layers.5.mlp.down_proj"} < set(others)
    assert not any("self_attn" in name for name in others)


def test_exported_tensors_are_the_compute_weights(llama):
    model, module, _, folder = llama
    tensors = tensors_of(folder)
    for fqn, child in module.named_modules():
        weights = child.__dict__.get("_compute_weights", {})
        for name, compute in weights.items():
            values = (
                compute if isinstance(compute, torch.Tensor) else compute.codes.view(torch.uint8)
            )
            ((hf_name, expected),) = model.adapter.to_hf({f"{fqn}.{name}": values.detach()}).items()
            if isinstance(compute, torch.Tensor):
                assert same_bits(tensors[hf_name], expected), hf_name
            else:
                assert same_bits(tensors[hf_name], expected.view(FP8)), hf_name
                assert same_bits(tensors[hf_name + SCALE_SUFFIX], compute.scale_inv), hf_name
    assert not differing(tensors, dict(iter_fp8_weights(module, model.adapter.to_hf)))


def test_transformers_computes_the_logits_of_the_dequantized_model(llama):
    """transformers dequantizes on a CPU and does not quantize activations. So does this module:
    the same weights, so that only the order of fp32 sums differs."""
    from transformers import AutoModelForCausalLM

    model, module, _, folder = llama
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    ours: Any = type(model.module)(model.args)
    state = {}
    for fqn, child in module.named_modules():
        for name, compute in child.__dict__.get("_compute_weights", {}).items():
            state[f"{fqn}.{name}"] = (
                compute.detach()
                if isinstance(compute, torch.Tensor)
                else dequantize_blockwise(compute.codes, compute.scale_inv)
            )
    ours.load_state_dict(state)
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)


def test_experts_are_exported_one_by_one(tmp_path):
    overrides = ("--blockwise_fp8.scale_format", "ue8m0", "--blockwise_fp8.main_round", "bf16")
    model = hf_model("deepseek_v3", *overrides)
    module = trained_model(model, scale_format="ue8m0", round_main_to_bf16=True)
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    options = (*overrides, "--shard-gb", "0.007")
    assert run("export", tmp_path / "ckpt", tmp_path / "hf", "deepseek_v3", *options) == 0
    tensors = tensors_of(tmp_path / "hf")
    assert not differing(tensors, dict(iter_fp8_weights(module, model.adapter.to_hf)))
    experts = module.layers["3"].moe.experts._compute_weights
    for expert in range(8):
        for hf_name, name in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            full_name = f"model.layers.3.mlp.experts.{expert}.{hf_name}.weight"
            assert same_bits(tensors[full_name], experts[name].codes[expert])
            assert same_bits(tensors[full_name + SCALE_SUFFIX], experts[name].scale_inv[expert])
    bias = tensors["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert same_bits(bias, module.layers["3"].moe.expert_bias) and bias.any()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert config["scale_fmt"] == "ue8m0"
    assert "model.layers.1.mlp.gate" in config["modules_to_not_convert"]


def test_bf16_export_rounds_the_main_parameters(llama, tmp_path):
    model, module, checkpoint, _ = llama
    assert run("export", checkpoint, tmp_path / "hf", "llama3", "--dtype", "bf16") == 0
    state = {fqn: view.gather_local() for fqn, view in module.state_dict().items()}
    expected = {name: t.bfloat16() for name, t in model.adapter.to_hf(state).items()}
    assert not differing(tensors_of(tmp_path / "hf"), expected)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "quantization_config" not in config


def quantized_anew(caplog) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [message.split()[0] for message in messages if "is quantized anew" in message]


HEADS_ACROSS_BLOCKS = TransformerModelArgs(dim=384, n_layers=1, n_heads=2)  # of 192 rows


def test_rows_ordered_across_blocks_are_quantized_in_that_order(tmp_path, caplog):
    to_hf = Llama3StateDictAdapter(HEADS_ACROSS_BLOCKS, None).to_hf
    attention = nn.ModuleDict(
        {name: BlockwiseFP8Linear(384, 384, bias=False) for name in ("wq", "wv")}
    )
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attention": attention})])})
    state = {fqn: tensor.detach().clone() for fqn, tensor in model.state_dict().items()}
    shard_zero1(model, None, compute_dtype=torch.float32)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    spec = ModelSpec({fqn: Entry((384, 384), FP8) for fqn in state}, {}, to_hf)
    list(export_checkpoint(DCPFolder(tmp_path / "ckpt"), tmp_path / "hf", spec))
    tensors = tensors_of(tmp_path / "hf")
    expected = {}
    for name, weight in to_hf(state).items():
        codes, scale_inv = quantize_blockwise(weight)
        expected |= {name: codes, name + SCALE_SUFFIX: scale_inv}
    assert not differing(tensors, expected)
    assert quantized_anew(caplog) == ["layers.0.attention.wq.weight"]
    caplog.clear()
    assert not differing(dict(iter_fp8_weights(model, to_hf)), expected)
    assert quantized_anew(caplog) == ["layers.0.attention.wq.weight"]


# Round trip.


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_import_of_an_export_is_exported_alike(tmp_path, scale_format):
    overrides = ("--blockwise_fp8.scale_format", scale_format)
    save_log_uniform(hf_model("llama3", *overrides), tmp_path / "ckpt")
    assert run("export", tmp_path / "ckpt", tmp_path / "a", "llama3", *overrides) == 0
    assert run("import", tmp_path / "a", tmp_path / "back", "llama3") == 0
    assert run("export", tmp_path / "back", tmp_path / "b", "llama3", *overrides) == 0
    first, second = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert first.keys() == second.keys()
    weights = [name for name, tensor in first.items() if tensor.dtype == FP8]
    assert len(weights) == 42
    for name in weights:
        scales = first.pop(name + SCALE_SUFFIX), second.pop(name + SCALE_SUFFIX)
        codes = first.pop(name), second.pop(name)
        if scale_format == "ue8m0":
            values = map(dequantize_blockwise, codes, scales)
            assert torch.equal(*values), name
        else:
            assert same_bits(*codes), name
            assert (scales[0].view(torch.int32) - scales[1].view(torch.int32)).abs().max() <= 1
    assert not differing(first, second)


def test_import_seeds_main_parameters_with_dequantized_values(llama, tmp_path):
    model, module, _, folder = llama
    assert run("import", folder, tmp_path / "ckpt", "llama3") == 0
    other = trained_model(model)
    state = other.state_dict()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    other.load_state_dict(state)
    for fqn, child in module.named_modules():
        for name, compute in child.__dict__.get("_compute_weights", {}).items():
            main = state[f"{fqn}.{name}"].gather_local()
            if isinstance(compute, torch.Tensor):
                assert torch.equal(main, compute), fqn
            else:
                values = dequantize_blockwise(compute.codes, compute.scale_inv)
                assert torch.equal(main, values), fqn


def test_tied_and_unnamed_weights_go_out_and_come_back(tmp_path):
    """The tied head has no name of its own, and a zero expert bias none at all."""
    shapes = {"embedding": (64, 32), "head": (64, 32), "experts": (3, 130, 70), "bias": (3,)}

    def to_hf(state):
        named = {}
        for fqn, tensor in state.items():
            if fqn == "experts":
                named |= {f"experts.{index}.weight": part for index, part in enumerate(tensor)}
            elif fqn == "embedding":
                named[fqn] = tensor
        return named

    entries = {
        "embedding": Entry(shapes["embedding"], torch.bfloat16),
        "experts": Entry(shapes["experts"], FP8),
        "bias": Entry(shapes["bias"], torch.float32),
    }
    spec = ModelSpec(entries, {"head": "embedding"}, to_hf)
    generator = torch.Generator().manual_seed(0)
    state = {fqn: torch.randn(shape, generator=generator) for fqn, shape in shapes.items()}
    state |= {"head": state["embedding"], "bias": torch.zeros(3)}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    stored = DCPFolder(tmp_path / "ckpt")
    assert len(list(export_checkpoint(stored, tmp_path / "hf", spec, shard_bytes=1))) == 4
    source = SafetensorsFolder(tmp_path / "hf")
    import_checkpoint(source, tmp_path / "back", spec, key=b"k" * 16)
    DCPFolder(tmp_path / "back", key=b"k" * 16)
    with pytest.raises(CheckpointError, match="is signed with another key"):
        DCPFolder(tmp_path / "back", key=b"x" * 16)
    back = {fqn: torch.full(shape, torch.nan) for fqn, shape in shapes.items()}
    dcp.load(back, checkpoint_id=tmp_path / "back", no_dist=True)
    assert torch.equal(back["head"], state["head"].bfloat16().float())
    assert torch.equal(back["embedding"], back["head"])
    assert torch.equal(back["experts"], dequantize_blockwise(*quantize_blockwise(state["experts"])))
    assert torch.equal(back["bias"], state["bias"])

    dcp.save(state | {"bias": torch.ones(3)}, checkpoint_id=tmp_path / "biased", no_dist=True)
    with pytest.raises(Mismatch, match="bias is not zero, and the format has no name for it"):
        list(export_checkpoint(DCPFolder(tmp_path / "biased"), tmp_path / "no", spec))


# Bad input: one error with every difference.


def message_of(capsys, code: int) -> str:
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("titan-fp8zero: ") and "Traceback" not in error
    return error


def rewrite(folder: Path, file: Path, **tensors: torch.Tensor | None) -> None:
    """Change or, with None, remove tensors of a file, and the index alike."""
    found = load_file(file)
    index = json.loads((folder / INDEX).read_text())
    for name, tensor in tensors.items():
        found.pop(name, None)
        index["weight_map"].pop(name, None)
        if tensor is not None:
            found[name] = tensor
            index["weight_map"][name] = file.name
    save_file(found, file)
    (folder / INDEX).write_text(json.dumps(index))


def test_all_that_an_import_lacks_is_told_at_once(llama, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(llama[3], folder)
    weight = "model.layers.{}.mlp.up_proj.weight"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 32}))
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, tensor in {
        "model.embed_tokens.weight": torch.zeros(1000, 256),
        "model.norm.weight": None,
        "model.layers.6.mlp.up_proj.weight": torch.zeros(3, 4),
        weight.format(0) + SCALE_SUFFIX: torch.ones(6, 1),
        weight.format(1) + SCALE_SUFFIX: torch.ones(6, 2, dtype=torch.bfloat16),
        weight.format(2) + SCALE_SUFFIX: None,
        "model.layers.3.input_layernorm.weight": torch.zeros(256, dtype=torch.float64),
    }.items():
        file = where.get(name, where["model.norm.weight"])
        rewrite(folder, folder / file, **{name: tensor})
    code = run("import", folder, tmp_path / "ckpt", "llama3")
    error = message_of(capsys, code)
    for line in (
        f"{folder} does not fit the model:",
        "model.embed_tokens.weight: shape (1000, 256), expected (2048, 256)",
        "missing: model.norm.weight (256,)",
        "unknown: model.layers.6.mlp.up_proj.weight (3, 4)",
        f"{weight.format(0)}_scale_inv: shape (6, 1), expected (6, 2)",
        f"{weight.format(1)}_scale_inv: dtype BF16, expected F32",
        f"missing: {weight.format(2)}_scale_inv (6, 2)",
        "model.layers.3.input_layernorm.weight: dtype F64, expected one of F32, BF16, F16",
        "config.json: num_attention_heads 32, expected 16",
    ):
        assert line in error, error
    assert len(error.splitlines()) == 9
    assert not (tmp_path / "ckpt").exists()


def test_scales_that_are_not_finite_are_not_imported(llama, tmp_path, capsys):
    folder = tmp_path / "hf"
    shutil.copytree(llama[3], folder)
    scale = f"model.layers.1.mlp.up_proj.weight{SCALE_SUFFIX}"
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][scale]
    rewrite(folder, file, **{scale: torch.full((6, 2), torch.nan)})
    error = message_of(capsys, run("import", folder, tmp_path / "ckpt", "llama3"))
    assert "model.layers.1.mlp.up_proj.weight of" in error and "not finite" in error
    assert not (tmp_path / "ckpt").exists()


def test_layers_for_further_tokens_are_left_out_by_name(llama, tmp_path, caplog):
    folder = tmp_path / "hf"
    shutil.copytree(llama[3], folder)
    file = max(folder.glob("*.safetensors"))
    extra = {
        "model.layers.6.eh_proj.weight": torch.zeros(3, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    rewrite(folder, file, **extra)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert run("import", folder, tmp_path / "ckpt", "llama3") == 0
    assert "model.layers.6.* is left out" in caplog.text


def test_broken_folders_are_told_file_by_file(llama, tmp_path, capsys):
    folder = tmp_path / "hf"
    code = run("import", folder, tmp_path / "ckpt", "llama3")
    assert "no such directory" in message_of(capsys, code)
    folder.mkdir()
    code = run("import", folder, tmp_path / "ckpt", "llama3")
    assert f"neither {INDEX} nor model.safetensors" in message_of(capsys, code)
    shutil.copytree(llama[3], folder, dirs_exist_ok=True)
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    error = message_of(capsys, run("import", folder, tmp_path / "ckpt", "llama3"))
    assert f"missing file: {first.name}" in error
    assert "no whole safetensors file" in error and second.name in error
    (folder / INDEX).write_text("[")
    code = run("import", folder, tmp_path / "ckpt", "llama3")
    assert f"{INDEX} has no weight_map" in message_of(capsys, code)
    (folder / INDEX).write_text('{"weight_map": {"a": 3}}')
    code = run("import", folder, tmp_path / "ckpt", "llama3")
    assert f"{INDEX} has 3 as the file of a" in message_of(capsys, code)
    shutil.copytree(llama[3], folder, dirs_exist_ok=True)
    (folder / CONFIG).write_text("[1]")
    code = run("import", folder, tmp_path / "ckpt", "llama3")
    assert f"{CONFIG} is no JSON object" in message_of(capsys, code)


def test_what_the_same_weights_would_compute_otherwise_is_named(llama, tmp_path, caplog):
    folder = tmp_path / "hf"
    shutil.copytree(llama[3], folder)
    assert run("import", folder, tmp_path / "same", "llama3", *SMALL_LLAMA) == 0
    assert "training computes" not in caplog.text
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"rope_theta": 10000.0}))
    assert run("import", folder, tmp_path / "other", "llama3", *SMALL_LLAMA) == 0
    assert "rope_theta 10000.0, training computes with 500000" in caplog.text


def test_bad_exports_are_told_and_write_nothing(llama, tmp_path, capsys):
    _, _, checkpoint, exported = llama
    target = tmp_path / "hf"
    error = message_of(capsys, run("export", checkpoint, exported, "llama3"))
    assert f"{exported} exists and is not an empty directory" in error
    error = message_of(capsys, run("export", tmp_path, target, "llama3"))
    assert "holds no complete checkpoint" in error
    error = message_of(capsys, run("export", checkpoint, target, "qwen3"))
    for line in (
        "missing: layers.7.feed_forward.w1.weight (3072, 256)",
        "missing: layers.0.attention.q_norm.weight (128,)",
        "layers.0.attention.wq.weight: shape (256, 256), expected (2048, 256)",
    ):
        assert line in error
    no_fp8 = run("export", checkpoint, target, "llama3", "--blockwise_fp8.fqns", "")
    assert "export with --dtype bf16" in message_of(capsys, no_fp8)
    flavor = run("export", checkpoint, target, "llama3", "--model.flavor", "9B")
    assert "[model] flavor of llama3 must be one of debugmodel, " in message_of(capsys, flavor)
    name = run("export", checkpoint, target, "llama3", "--model.name", "llama4")
    assert message_of(capsys, name)
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "__0_0.distcp").unlink()
    error = message_of(capsys, run("export", broken, target, "llama3"))
    assert "lacks __0_0.distcp" in error
    assert not target.exists()


def test_damaged_stock_checkpoints_are_told_by_file_or_weight(llama, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(llama[2], broken)
    for file, named in (
        ("__0_0.distcp", f"weight of {broken} cannot be read"),
        (".metadata", f"{broken / '.metadata'} is damaged"),
    ):
        (broken / file).write_bytes((broken / file).read_bytes()[:-2000])
        code = run("export", broken, tmp_path / file, "llama3", *SMALL_LLAMA)
        assert named in message_of(capsys, code)


def test_a_place_that_cannot_be_written_is_told(llama, tmp_path, capsys, monkeypatch):
    _, _, checkpoint, exported = llama
    target = tmp_path / "file" / "x"
    target.parent.touch()
    code = run("export", checkpoint, target, "llama3", *SMALL_LLAMA)
    assert f"{target} is not complete: " in message_of(capsys, code)
    code = run("import", exported, target, "llama3", *SMALL_LLAMA)
    assert f"{target} is not written: " in message_of(capsys, code)

    def deny(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    with monkeypatch.context() as denied:
        denied.setattr(Path, "exists", deny)
        for command, source in (("export", checkpoint), ("import", exported)):
            code = run(command, source, target, "llama3", *SMALL_LLAMA)
            assert f"Permission denied: '{target}'" in message_of(capsys, code)

    def fill_disk(*args, **kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors_folder, "save_file", fill_disk)
    code = run("export", checkpoint, tmp_path / "hf", "llama3", *SMALL_LLAMA)
    assert f"{tmp_path / 'hf'} is not complete: No space left" in message_of(capsys, code)


# config.json.


@pytest.mark.parametrize(
    "name, flavor, changes, told",
    [
        ("qwen3", "0.6B", {"qk_norm": False}, ["qk_norm = False"]),
        (
            "qwen3",
            "debugmodel_moe",
            {"score_func": "sigmoid", "route_scale": 2.0, "score_before_experts": True},
            ["score_func = 'sigmoid'", "route_scale", "score_before_experts"],
        ),
        ("deepseek_v3", "debugmodel", {"gate_bias": True}, ["gate_bias"]),
    ],
)
def test_models_that_hugging_face_cannot_express_are_refused(name, flavor, changes, told):
    model = hf_model(name, "--model.flavor", flavor)
    for key, value in changes.items():
        setattr(
            model.args.moe_args if hasattr(model.args.moe_args, key) else model.args, key, value
        )
    with pytest.raises(Inexpressible) as error:
        hf_config(model.args, model.spec([], torch.float32).dcp_shapes, torch.float32)
    assert all(reason in str(error.value) for reason in told)


@pytest.mark.parametrize(
    "name, flavor",
    [("qwen3", "debugmodel"), ("llama3", "debugmodel"), ("deepseek_v3", "debugmodel")],
)
def test_transformers_makes_a_model_of_the_same_weights(name, flavor):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = hf_model(name, "--model.flavor", flavor)
    spec = model.spec([], torch.float32)
    described = hf_config(model.args, spec.dcp_shapes, torch.bfloat16)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    # transformers keeps experts stacked, whatever the file has.
    theirs_shapes = {
        key: tuple(value.shape)
        for key, value in theirs.state_dict().items()
        if ".experts." not in key and not (key == "lm_head.weight" and spec.tied)
    }
    ours = {
        tensor.name: tensor.shape for tensor in spec.hf_tensors if ".experts." not in tensor.name
    }
    assert theirs_shapes == ours
