"""Files of a source as people name them: shards, folders, patterns, splits; functions for odd rows; several sources."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from rlhfless_functions import artifacts
from rlhfless_functions.data.dataset_files import read_table, read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.sources import SourceError, choose_files, choose_split
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import DataSettings, MixedSource, SamplingSettings
from tests.data.reading import tokenizer as tokenizer
from tests.data.reading import write_jsonl


def prompts_in(source: object, **settings: Any) -> list[Any]:
    return [row["prompt"] for row in read_table(MixedSource(source=str(source), **settings)).rows]


def refusal(source: object, **settings: Any) -> str:
    with pytest.raises(TaskError) as raised:
        read_table(MixedSource(source=str(source), **settings))
    assert not raised.value.retryable
    return str(raised.value)


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["b.jsonl", "a.jsonl"], None, ["a.jsonl", "b.jsonl"]),
        (["README.md", ".git/x.json", "_tmp.jsonl", "dataset_infos.json", "a.jsonl"], None, ["a.jsonl"]),
        (["data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet"], None, ["0", "1"]),
        (["train.jsonl", "test.jsonl"], None, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["gsm8k_train.jsonl", "gsm8k_val.jsonl"], "validation", ["gsm8k_val.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl"], None, ["train/a.jsonl"]),
        (["test.jsonl"], None, ["test.jsonl"]),
        (["train.jsonl.gz"], None, ["train.jsonl.gz"]),
        (["trainer.jsonl", "tests.jsonl"], None, ["tests.jsonl", "trainer.jsonl"]),
    ],
)
def test_the_files_of_a_folder_are_those_that_people_mean(names: list[str], split: str | None, chosen: Any) -> None:
    if chosen == ["0", "1"]:
        chosen = sorted(names)
    assert choose_files(names, "folder", split, pattern=False) == chosen


@pytest.mark.parametrize(
    ("names", "split", "words"),
    [
        (["a.txt"], None, "has no file of JSON lines"),
        (["main/a.jsonl", "socratic/a.jsonl"], None, "has the folders main, socratic; name one of them"),
        (["a.jsonl", "b.parquet"], None, "files of several formats (jsonl, parquet)"),
        (["validation.jsonl", "test.jsonl"], None, "and none is train; set data.split"),
        (["train.jsonl"], "test", "has no split 'test'; set data.split to one of train"),
        (["a.jsonl", "test.jsonl"], None, "has a.jsonl beside files of a split (test)"),
    ],
)
def test_a_folder_that_does_not_tell_is_refused_with_the_remedy(
    names: list[str], split: str | None, words: str
) -> None:
    with pytest.raises(SourceError) as raised:
        choose_files(names, "folder", split, pattern=False)
    assert words in str(raised.value)


def test_a_split_is_known_by_its_other_names() -> None:
    assert choose_split(["train", "validation"], "dev", "x") == "validation"
    assert choose_split(["train", "test"], None, "x") == "train"


def test_shards_are_read_in_their_order_and_name_their_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    for number in (1, 0):
        rows = [{"prompt": f"{number}{row}"} for row in range(2)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"train-{number:05}-of-00002.parquet")
    for source in (tmp_path, tmp_path / "train-*.parquet", f"file://{tmp_path}/train-*.parquet", f"file://{tmp_path}"):
        assert prompts_in(source) == ["00", "01", "10", "11"]
    assert read_table(MixedSource(source=str(tmp_path))).where(3) == "row 1 of train-00001-of-00002.parquet"
    assert "matches no file" in refusal(tmp_path / "test-*.parquet")


def test_shards_may_be_in_a_store(s3: str) -> None:
    for number in range(2):
        artifacts.write_bytes(f"{s3}/data/train-{number}.jsonl", json.dumps({"prompt": str(number)}).encode())
    artifacts.write_bytes(f"{s3}/data/test-0.jsonl", b'{"prompt": "held out"}')
    assert prompts_in(f"{s3}/data") == prompts_in(f"{s3}/data/train-*.jsonl") == ["0", "1"]
    assert prompts_in(f"{s3}/data", split="test") == ["held out"]


def test_csv_is_text_as_it_is_written(tmp_path: Path) -> None:
    rows = [["prompt", "answer", "note"], ["two\nlines, and a comma", "007", ""], ["b", "1e5", "x"]]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=delimiter).writerows(rows)
        table = read_table(MixedSource(source=str(tmp_path / name)))
        assert table.rows[0] == {"prompt": "two\nlines, and a comma", "answer": "007", "note": None}
        assert table.rows[1]["answer"] == "1e5" and table.where(1) == "line 4"


def test_a_json_list_and_arrow_files_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "1"}, {"prompt": "2"}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write(table)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write(table)
    for name in ("a.json", "file.arrow", "stream.arrow"):
        assert prompts_in(tmp_path / name) == ["1", "2"]


def test_a_saved_dataset_s_split_is_named(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_list([{"prompt": name}]) for name in ("validation", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert "has the splits" in refusal(tmp_path / "saved") and "set data.split" in refusal(tmp_path / "saved")
    assert prompts_in(tmp_path / "saved", split="test") == ["test"]
    assert "has no splits; remove data.split" in refusal(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}]), split="x"
    )


# --- map and filter ----------------------------------------------------------------------------------------------

FUNCTIONS = """
from shared import PREFIX

def turned(row):
    return {"prompt": PREFIX + row["q"], "answer": row["a"].split("#### ")[1]}

def numbered(row, number):
    return {"prompt": str(number)}

def short(row):
    return len(row["prompt"]) < 4

def none(row):
    return False

def wrong(row):
    return [row]
"""


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Any]:
    """A source in a form of its own, and the file of functions for it."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "shared.py").write_text("PREFIX = 'q:'\n")
    rows = [{"q": "1", "a": "so #### 2"}, {"q": "long", "a": "so #### 3"}, {"q": "3", "a": "so #### 4"}]
    return {"source": write_jsonl(tmp_path / "odd.jsonl", rows), "file": str(tmp_path / "functions.py")}


def test_functions_turn_and_choose_rows_which_keep_their_lines(odd: dict[str, Any]) -> None:
    named = {
        name: {"file": odd["file"], "function": function} for name, function in (("map", "turned"), ("filter", "short"))
    }
    table = read_table(MixedSource(source=odd["source"], **named))
    assert [(row["prompt"], row["answer"], row["q"]) for row in table.rows] == [("q:1", "2", "1"), ("q:3", "4", "3")]
    assert (table.where(1), table.filtered) == ("line 3", 1)
    assert prompts_in(odd["source"], map={"file": odd["file"], "function": "numbered"}) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("field", "function", "words"),
    [
        ("map", "short", "line 1: data.map raised KeyError: 'prompt'"),
        ("map", "wrong", "line 1: data.map returned list, not a dict"),
        ("map", "missing", "has no function missing; it has turned, numbered"),
        ("filter", "none", "keeps no row"),
    ],
)
def test_functions_that_fail_are_named_with_the_row(odd: dict[str, Any], field: str, function: str, words: str) -> None:
    assert words in refusal(odd["source"], **{field: {"file": odd["file"], "function": function}})


# --- several -----------------------------------------------------------------------------------------------------


def test_several_sources_have_columns_and_functions_of_their_own(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    gsm = write_jsonl(tmp_path / "gsm.jsonl", [{"question": "1", "answer": "2"}, {"question": "", "answer": "2"}])
    math = write_jsonl(tmp_path / "math.jsonl", [{"problem": "3", "solution": "4"}])
    sources = [{"source": gsm}, {"source": math, "prompt_column": "problem", "weight": 2.0}]
    data = DataSettings(sources=sources, ground_truth_column=None)
    prompts, counts = make_prompts(read_tables(data), data, SamplingSettings(), tokenizer)
    assert [(each.row, each.text, each.ground_truth) for each in prompts] == [(0, "1", "2"), (1, "3", "4")]
    assert (counts.rows, counts.empty, counts.sizes) == (3, 1, [1, 1])
    assert counts.first["empty"] == f"line 2 of {gsm}"


def test_a_source_takes_what_it_leaves_out_from_the_data() -> None:
    data = DataSettings(
        sources=[{"source": "a"}, {"source": "b", "system_prompt": "own"}], system_prompt="all", split="test"
    )
    assert [(part.system_prompt, part.split) for part in data.parts] == [("all", "test"), ("own", "test")]


@pytest.mark.parametrize("given", [{}, {"source": "a", "sources": [{"source": "b"}]}])
def test_one_source_or_several(given: Any) -> None:
    with pytest.raises(ValueError, match="data needs source or sources"):
        DataSettings(**given)
