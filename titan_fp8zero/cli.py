"""The command line: `titan-fp8zero COMMAND`. `COMMANDS` is the list to add to."""

import argparse
import logging
import math
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException

from titan_fp8zero.bench.gemm import bench_gemm
from titan_fp8zero.bench.kernels import bench_kernels
from titan_fp8zero.bench.train import bench_train
from titan_fp8zero.compare import compare, print_comparison
from titan_fp8zero.job import BadInput, load_job, load_planned_job, parse_config
from titan_fp8zero.layout import STRATEGIES
from titan_fp8zero.spawn import RanksFailed, run_on_ranks

OVERRIDES = (
    "All other options go to TorchTitan and override the config, for example --training.steps 10."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 1 where ranks failed, 2 for bad input, 128 and the
    signal's number where a signal ended it."""
    parser = _parser()
    args, overrides = parser.parse_known_args(argv)
    if overrides and not args.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    args.overrides = overrides
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # Of torch's, for every part of a checkpoint that one process reads or writes.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        args.run(args)
    except BadInput as error:
        print(f"titan-fp8zero: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"titan-fp8zero: {error}", file=sys.stderr)
        return 1
    except SignalException as error:
        return _interrupted(error.sigval)
    except KeyboardInterrupt:
        return _interrupted(signal.SIGINT)
    return 0


def _interrupted(by: signal.Signals) -> int:
    print(f"titan-fp8zero: ended by {by.name}", file=sys.stderr)
    return 128 + by


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan-fp8zero", description="Blockwise FP8 ZeRO-1 training in TorchTitan."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(commands)
    return parser


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train a TorchTitan config on this machine's GPUs, or on its CPU",
        description="Trains a TorchTitan config on this machine's GPUs, or on its CPU where there "
        "are none. Writes metrics.jsonl and loss.png into the config's dump folder.",
        epilog=OVERRIDES,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the TOML config")
    _add_nproc(parser)
    parser.set_defaults(run=_train, takes_overrides=True)


def _train(args: argparse.Namespace) -> None:
    load_job(args.config, args.overrides, args.nproc).train()


def _add_compare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="train two configs on the same data and seed, and compare their losses",
        description="Trains two configs from scratch, one after the other, on the same data, seed "
        "and steps. Writes compare.md, compare.json and compare.png.",
    )
    parser.add_argument("a", metavar="A", type=Path, help="the first TOML config, the baseline")
    parser.add_argument("b", metavar="B", type=Path, help="the second TOML config")
    parser.add_argument(
        "--steps", type=_positive, metavar="N", help="steps (default: the configs')"
    )
    _add_nproc(parser)
    parser.add_argument(
        "--out",
        type=_output_folder,
        metavar="DIR",
        default=Path("outputs/compare"),
        help="where to write (default: %(default)s)",
    )
    parser.set_defaults(run=_compare, takes_overrides=False)


def _compare(args: argparse.Namespace) -> None:
    print_comparison(compare(args.a, args.b, args.steps, args.nproc, args.out))
    print(f"written to {args.out}: compare.md, compare.json, compare.png")


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        help="lay a config out on a mesh of any size, without GPUs: tiles, bytes, estimated times",
        description="Lays a TorchTitan config out as training would, without running it: who owns "
        "which tiles, what each rank holds, and what a step sends, beside three other schemes.",
        epilog=OVERRIDES,
    )
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the TOML config")
    parser.add_argument(
        "--world-size",
        type=_positive,
        metavar="N",
        help="ranks (default: the product of the config's degrees)",
    )
    parser.add_argument(
        "--strategy",
        choices=(*STRATEGIES, "both"),
        help="of which strategy to show the layout (default: the config's)",
    )
    parser.add_argument(
        "--network-gbps",
        type=_positive_number,
        metavar="X",
        default=50.0,
        help="GB/s (10^9 bytes a second) that a rank sends, while it receives as much, for the "
        "estimated times (default: %(default)g, a 400 Gbit/s link a rank)",
    )
    parser.add_argument(
        "--memory-gbps",
        type=_positive_number,
        metavar="X",
        default=4000.0,
        help="GB/s that a rank's memory reads and writes together (default: %(default)g)",
    )
    parser.add_argument(
        "--json", type=_output_file, metavar="FILE", help="write the whole plan as JSON"
    )
    parser.add_argument("--png", type=_image, metavar="FILE", help="draw who owns which tiles")
    parser.set_defaults(run=_plan, takes_overrides=True)


def _plan(args: argparse.Namespace) -> None:
    job = load_planned_job(args.config, args.overrides, args.world_size)

    from titan_fp8zero.titan.planner.command import run_plan  # imports TorchTitan

    bandwidths = (args.network_gbps, args.memory_gbps)
    run_plan(job, args.strategy, bandwidths, json_file=args.json, image=args.png)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("bench", help="measure speed and memory on this machine")
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)

    step = benchmarks.add_parser(
        "step",
        allow_abbrev=False,
        help="the ZeRO-1 step of a config's model, phase by phase, with FP8 and without",
    )
    step.add_argument("config", metavar="CONFIG", type=Path, help="the TOML config")
    _add_nproc(step)
    step.set_defaults(run=_bench_step, takes_overrides=True)

    for name, run, what in (
        ("kernels", bench_kernels, "each kernel, beside the device's copy bandwidth"),
        ("gemm", bench_gemm, "FP8 GEMMs and linears, beside bf16, DeepGEMM and torchao"),
    ):
        benchmark = benchmarks.add_parser(name, allow_abbrev=False, help=what)
        _add_bench_out(benchmark)
        benchmark.set_defaults(run=_bench_device, takes_overrides=False, name=name, bench=run)

    train = benchmarks.add_parser(
        "train", allow_abbrev=False, help="tokens/s and peak memory of configs"
    )
    train.add_argument("configs", metavar="CONFIG", type=Path, nargs="+")
    train.add_argument("--steps", type=_positive, metavar="N", default=20)
    _add_nproc(train)
    _add_bench_out(train)
    train.set_defaults(run=_bench_train, takes_overrides=True)


def _bench_step(args: argparse.Namespace) -> None:
    job = load_job(args.config, args.overrides, args.nproc)
    from titan_fp8zero.titan.converter import check_converts  # imports TorchTitan

    check_converts(job, "time")
    arguments = ["--job.config_file", str(args.config), *args.overrides]
    run_on_ranks("titan_fp8zero.bench.step", arguments, job.nproc, shown_ranks={0})


def _bench_device(args: argparse.Namespace) -> None:
    args.bench(args.out)
    print(f"written to {args.out}: {args.name}.json, {args.name}.png")


def _bench_train(args: argparse.Namespace) -> None:
    bench_train(args.configs, args.overrides, args.steps, args.nproc, args.out)
    print(f"written to {args.out}: train.json, train.png")


def _add_bench_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=_output_folder, metavar="DIR", default=Path("outputs/bench"))


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a checkpoint's model as Hugging Face safetensors, in FP8",
        description="Writes the model of a DCP checkpoint as Hugging Face safetensors: FP8 weights "
        "as training computes with them, beside their weight_scale_inv, in DeepSeek-V3's layout.",
        epilog=OVERRIDES,
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, help="a checkpoint's step-N folder"
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write; new or empty")
    _add_config(parser)
    parser.add_argument(
        "--dtype",
        choices=("fp8", "bf16"),
        default="fp8",
        help="fp8: as the config says; bf16: all weights in bfloat16 (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-gb",
        type=_positive_number,
        metavar="GB",
        default=5.0,
        help="size of a file, 10^9 bytes (default: %(default)s)",
    )
    parser.set_defaults(run=_export, takes_overrides=True)


def _export(args: argparse.Namespace) -> None:
    config = parse_config(args.config, args.overrides)
    from titan_fp8zero.titan.interchange import export_model

    is_bf16, shard_bytes = args.dtype == "bf16", int(args.shard_gb * 1e9)
    export_model(args.checkpoint, args.folder, config, as_bf16=is_bf16, shard_bytes=shard_bytes)


def _add_import(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="write Hugging Face safetensors as a checkpoint to train from",
        description="Writes Hugging Face safetensors, in FP8 with weight_scale_inv, bf16 or fp32, "
        "as a DCP checkpoint of the weights alone, for [checkpoint] initial_load_path.",
        epilog=OVERRIDES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a folder of safetensors files")
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=Path, help="where to write; new or empty"
    )
    _add_config(parser)
    parser.set_defaults(run=_import, takes_overrides=True)


def _import(args: argparse.Namespace) -> None:
    config = parse_config(args.config, args.overrides)
    from titan_fp8zero.titan.interchange import import_model

    import_model(args.folder, args.checkpoint, config)
    print(f"written to {args.checkpoint}: train with --checkpoint.initial_load_path")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        type=Path,
        required=True,
        help="the TOML config that trains the model",
    )


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc", type=_positive, metavar="N", help="ranks (default: all GPUs, or 2 on a CPU)"
    )


def _output_folder(text: str) -> Path:
    """Made at once: who cannot write there learns it before a long run, not after."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be a folder: {error.strerror}") from None
    return Path(text)


def _output_file(text: str) -> Path:
    _output_folder(str(Path(text).parent))
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, expected a file")
    return Path(text)


def _image(text: str) -> Path:
    if Path(text).suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text} does not end in .png")
    return _output_file(text)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return number


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


COMMANDS = (_add_train, _add_compare, _add_plan, _add_bench, _add_export, _add_import)

if __name__ == "__main__":
    sys.exit(main())
