"""Real text without a download: datasets and a tokenizer, in TorchTitan's own terms.

| dataset | text |
|---|---|
| `python_docs` | prose that ships with CPython (its help topics), nine topics of ten |
| `python_docs_validation` | one topic of ten, a tenth of the text |
| `local_text` | the `.jsonl` and `.txt` files at `training.dataset_path` |

TorchTitan's own datasets keep their names.
"""

import json
import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from random import Random
from typing import TextIO

from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets import text_datasets as stock
from torchtitan.tools.logging import logger

BUILT_IN_TOKENIZER = "python_docs_tokenizer"
"""Name of the directory that `model.hf_assets_path` ends in to get the built-in tokenizer."""

VOCAB_SIZE = 2048  # of TorchTitan's debug models
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

_DATASET_PATH = "training.dataset_path (of a validation dataset: validation.dataset_path)"

TXT_PIECE = 16 * 1024
TOPIC_PIECE = 1024
"""Characters in a sample of a `.txt` file, or a topic: longer ones are cut at line ends, for ranks
to share. Topics are cut short and shuffled, so that a batch is not all of one topic."""


VALIDATION_TOPIC = 6
"""Which of every ten topics, sorted, is for validation: these have about a tenth of the text."""


def register_datasets() -> None:
    """Adds our datasets to TorchTitan's."""
    for name, path, load in (
        ("python_docs", "pydoc_data.topics", lambda path: _python_docs(validation=False)),
        ("python_docs_validation", "pydoc_data.topics", lambda path: _python_docs(validation=True)),
        ("local_text", "", _local_text),
    ):
        stock.DATASETS[name] = DatasetConfig(
            path=path, loader=load, sample_processor=lambda sample: sample["text"]
        )


def python_docs(validation: bool) -> list[str]:
    """The samples of one split: of all topics in sorted order, one of ten is for validation."""
    from pydoc_data.topics import topics

    chosen = [
        name for i, name in enumerate(sorted(topics)) if (i % 10 == VALIDATION_TOPIC) == validation
    ]
    samples = [piece for name in chosen for piece in _pieces(StringIO(topics[name]), TOPIC_PIECE)]
    Random(0).shuffle(samples)
    return samples


def _python_docs(validation: bool) -> Dataset:
    return Dataset.from_dict({"text": python_docs(validation)})


def _local_text(path: str) -> IterableDataset:
    files = _text_files(path)
    # Errors of the first sample are raised here, of others when they are read.
    if next(_samples(files), None) is None:
        raise ValueError(f'{_DATASET_PATH} = "{path}": no text, all files are empty')
    return IterableDataset.from_generator(_samples, gen_kwargs={"files": files})


def _text_files(path: str) -> list[str]:
    if not path:
        raise ValueError(
            f'dataset "local_text" reads its text from {_DATASET_PATH}, which is not set: '
            "name a .jsonl or .txt file, or a directory of such files"
        )
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f'{_DATASET_PATH} = "{path}": no such file or directory')
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    files = [file for file in files if file.suffix in (".jsonl", ".txt")]
    if not files:
        raise ValueError(f'{_DATASET_PATH} = "{path}": neither a .jsonl nor a .txt file')
    return [str(file) for file in files]


def _samples(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        read = _jsonl_samples if file.endswith(".jsonl") else _txt_samples
        for text in read(file):
            yield {"text": text}


def _jsonl_samples(file: str) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{_DATASET_PATH}: {file}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f'{where} is not an object with a string field "text"')
            yield record["text"]


def _txt_samples(file: str) -> Iterator[str]:
    with open(file, encoding="utf-8") as stream:
        yield from _pieces(stream, TXT_PIECE)


def _pieces(stream: TextIO, characters: int) -> Iterator[str]:
    """Whole lines together, until they reach so many characters."""
    while lines := stream.readlines(characters):
        yield "".join(lines)


def build_text_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """TorchTitan's text dataloader, but a rank whose share holds no whole sequence is an error.

    TorchTitan loops over an empty share for ever.
    """
    dataloader = stock.build_text_dataloader(
        dp_world_size, dp_rank, tokenizer, job_config, infinite
    )
    share = dataloader.dataset
    assert isinstance(share, stock.HuggingFaceTextDataset)
    wanted = share.seq_len + 1
    found = _count_tokens(share, tokenizer, enough=wanted)
    if found < wanted:
        raise ValueError(
            f'too little text in training.dataset "{job_config.training.dataset}" for '
            f"{dp_world_size} data-parallel ranks: rank {dp_rank} gets {found} tokens, and one "
            f"sequence (training.seq_len = {share.seq_len}) takes {wanted}. "
            "Use more text, fewer ranks or shorter sequences."
        )
    return dataloader


def _count_tokens(
    share: stock.HuggingFaceTextDataset, tokenizer: BaseTokenizer, enough: int
) -> int:
    count = 0
    for sample in share._data:
        text = share._text_processor(sample)
        count += len(tokenizer.encode(text, add_bos=True, add_eos=True))
        if count >= enough:
            break
    return count


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """TorchTitan's tokenizer from `model.hf_assets_path`.

    Where that path ends in `python_docs_tokenizer`, the built-in tokenizer is trained there first,
    unless an earlier run has.
    """
    directory = Path(job_config.model.hf_assets_path)
    if directory.name == BUILT_IN_TOKENIZER and not (directory / "tokenizer.json").exists():
        logger.info(f"Training the built-in tokenizer on python_docs into {directory}")
        _write_built_in_tokenizer(directory)
    return build_hf_tokenizer(job_config)


def _write_built_in_tokenizer(directory: Path) -> None:
    """Writes the tokenizer's files; several ranks may do so at once, with the same content."""
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    directory.mkdir(parents=True, exist_ok=True)
    _write_whole(directory / "tokenizer_config.json", json.dumps(config, indent=2))
    # Last: it tells other ranks that the directory is complete.
    _write_whole(directory / "tokenizer.json", _train_tokenizer().to_str(pretty=True))


def _write_whole(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(content, encoding="utf-8")
    aside.replace(path)


def _train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(python_docs(validation=False), trainer)
    return tokenizer
