import json
import multiprocessing
from types import SimpleNamespace

import pytest
from torchtitan.config.job_config import DataLoader
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from titan_fp8zero.titan import text


def config(dataset, path=None, seq_len=16, assets="unused"):
    return SimpleNamespace(
        training=SimpleNamespace(
            dataset=dataset,
            dataset_path=None if path is None else str(path),
            local_batch_size=1,
            seq_len=seq_len,
            dataloader=DataLoader(),
        ),
        model=SimpleNamespace(hf_assets_path=str(assets)),
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    assets = tmp_path_factory.mktemp("assets") / "python_docs_tokenizer"
    return text.build_tokenizer(config("python_docs", assets=assets))


def load(path):
    return [sample["text"] for sample in DATASETS["local_text"].loader(str(path))]


def test_stock_datasets_keep_their_names():
    assert {"c4", "c4_test", "c4_validation", "python_docs", "local_text"} <= DATASETS.keys()


def test_python_docs_are_split_by_topic():
    from pydoc_data.topics import topics

    def lines(texts):
        return sorted(line for text in texts for line in text.splitlines())

    train, validation = text.python_docs(validation=False), text.python_docs(validation=True)
    every_tenth = [topics[name] for name in sorted(topics)[6::10]]
    assert lines(validation) == lines(every_tenth)
    assert lines(train + validation) == lines(topics.values())
    assert train == text.python_docs(validation=False), "the order is the same each time"
    for name, expected in (("python_docs", train), ("python_docs_validation", validation)):
        assert list(DATASETS[name].loader("")["text"]) == expected


def test_tokenizer_is_built_once_and_has_special_tokens(tmp_path):
    assets = tmp_path / "python_docs_tokenizer"
    tokenizer = text.build_tokenizer(config("python_docs", assets=assets))
    assert tokenizer.get_vocab_size() == 2048
    ids = tokenizer.encode("def f(ä): 🎉\n", add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.bos_id != tokenizer.eos_id
    assert tokenizer.decode(ids[1:-1]) == "def f(ä): 🎉\n"

    assert {file.name for file in assets.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    before = (assets / "tokenizer.json").stat()
    text.build_tokenizer(config("python_docs", assets=assets))
    assert (assets / "tokenizer.json").stat() == before


def test_ranks_that_race_write_the_same_tokenizer(tmp_path):
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=text._write_built_in_tokenizer, args=(tmp_path / "a",))
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    text._write_built_in_tokenizer(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_other_tokenizer_directories_are_torchtitans_business(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        text.build_tokenizer(config("python_docs", assets=tmp_path / "elsewhere"))
    assert not (tmp_path / "elsewhere").exists()


def test_local_text_reads_jsonl_txt_and_directories(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    (tmp_path / "b.txt").write_text("three\nfour\n")
    (tmp_path / "c.md").write_text("not read")
    assert load(tmp_path / "a.jsonl") == ["one", "two"]
    assert load(tmp_path) == ["one", "two", "three\nfour\n"]


def test_long_txt_is_cut_into_pieces_that_lose_nothing(tmp_path):
    content = "".join(f"line {i}\n" for i in range(10_000))
    (tmp_path / "long.txt").write_text(content)
    pieces = load(tmp_path / "long.txt")
    assert "".join(pieces) == content
    assert len(pieces) > 4
    assert all(piece.endswith("\n") for piece in pieces)


def test_ranks_share_one_file_and_resume_where_they_were(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"sample {i}"}) + "\n" for i in range(40)))

    def dataset(rank):
        return HuggingFaceTextDataset(
            "local_text", str(path), tokenizer, seq_len=8, dp_rank=rank, dp_world_size=2
        )

    def batches(data, count):
        iterator = iter(data)
        return [next(iterator)[1].tolist() for _ in range(count)]

    words = [tokenizer.decode([t for b in batches(dataset(r), 6) for t in b]) for r in (0, 1)]
    numbers = [set(w.replace("sample", " ").split()) for w in words]
    assert not numbers[0] & numbers[1] and all(numbers)

    first, resumed = dataset(0), dataset(0)
    batches(first, 3)
    resumed.load_state_dict(first.state_dict())
    assert batches(resumed, 3) == batches(dataset(0), 6)[3:]


@pytest.mark.parametrize(
    "content, name, message",
    [
        ('{"text": "a"}\n{"text": \n', "x.jsonl", "x.jsonl, line 2 is not JSON"),
        (
            '{"txt": "a"}\n',
            "x.jsonl",
            'x.jsonl, line 1 is not an object with a string field "text"',
        ),
        ("[1]\n", "x.jsonl", "x.jsonl, line 1 is not an object"),
        ("", "x.jsonl", "no text, all files are empty"),
        ("\n\n", "x.jsonl", "no text, all files are empty"),
        ("", "x.txt", "no text, all files are empty"),
        ("a,b", "x.csv", "neither a .jsonl nor a .txt file"),
    ],
)
def test_bad_local_text_names_the_config_key(tmp_path, content, name, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=r"training\.dataset_path") as error:
        load(path)
    assert message in str(error.value)


def test_missing_local_text_names_the_config_key(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"training\.dataset_path .*nowhere.*no such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"training\.dataset_path .*is not set"):
        load("")
    with pytest.raises(ValueError, match=r"neither a \.jsonl nor a \.txt file"):
        load(tmp_path)


@pytest.mark.parametrize("samples, ranks", [(1, 2), (3, 8), (1, 1)])
def test_too_little_text_is_an_error_not_a_hang(tmp_path, tokenizer, samples, ranks):
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "short"}\n' * samples)
    with pytest.raises(
        ValueError, match=r"too little text .*training\.seq_len = 4096.*fewer ranks"
    ):
        text.build_text_dataloader(
            ranks, ranks - 1, tokenizer, config("local_text", path, seq_len=4096)
        )


def test_a_share_of_one_sequence_is_enough(tmp_path, tokenizer):
    path = tmp_path / "short.txt"
    path.write_text("a few words of text for one sequence, and no more")
    loader = text.build_text_dataloader(1, 0, tokenizer, config("local_text", path, seq_len=8))
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == labels.shape == (1, 8)
    assert inputs["input"][0, 0] == tokenizer.bos_id
