"""Datasets of other frameworks' configurations: names on the hub, files, and several of them."""

from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.convert import convert, job_yaml, read_configuration
from rlhfless_operator.convert.conversion import Conversion, Left
from rlhfless_operator.convert.datasets import is_file, source_of
from rlhfless_operator.convert.reading import Configuration
from rlhfless_operator.job.reading.validation import parse_job

VERL = "python3 -m verl.trainer.main_ppo"


def converted(peer: Any, **given: Any) -> Conversion:
    conversion = convert(Configuration(peer, given), "x.yaml", 1)
    parse_job(job_yaml(conversion))
    return conversion


def data_of(conversion: Conversion, section: str = "data") -> dict[str, Any]:
    spec = conversion.document["spec"]
    data = spec["evaluation"]["data"] if section == "evaluation" else spec[section]
    names = ("source", "sources", "subset", "split", "revision", "map", "filter", "weight")
    return {name: data[name] for name in names if name in data}


def reasons(conversion: Conversion) -> str:
    return "; ".join(line.outcome.reason for line in conversion.left if isinstance(line.outcome, Left))


@pytest.mark.parametrize("name", ["openai/gsm8k", "gsm8k", "BytedTsinghua-SIA/DAPO-Math-17k", "a_b/c.d-1"])
def test_a_name_as_the_hub_has_it_is_a_dataset_on_the_hub(name: str) -> None:
    assert source_of(name, "main", "train[:10]") == {"source": f"hub:{name}", "subset": "main", "split": "train[:10]"}


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "d/a.parquet", "./openai/gsm8k", "~/d/x", "/d/x", "s3://b/x", "hf://datasets/o/n/x", "a/b/c", "d/*",
     "a.csv", "a.json.gz", "A.PARQUET", "../x"],
)  # fmt: skip
def test_a_path_stays_a_file_without_subset_and_split(name: str) -> None:
    assert is_file(name)
    assert source_of(name, "main", "train") == {"source": name}


def test_trl_names_a_dataset_its_configuration_and_its_splits() -> None:
    conversion = converted(
        "trl", dataset_name="openai/gsm8k", dataset_config="main", dataset_train_split="all", eval_strategy="steps"
    )
    assert data_of(conversion) == {"source": "hub:openai/gsm8k", "subset": "main", "split": "all"}
    assert data_of(conversion, "evaluation") == {"source": "hub:openai/gsm8k", "subset": "main", "split": "test"}


def test_trls_list_and_open_r1s_mixture_are_sources() -> None:
    listed = [{"path": "org/a", "name": "main", "split": "train", "columns": ["prompt"]},
              {"path": "json", "data_files": {"train": ["b.jsonl", "c.jsonl"], "test": "d.jsonl"}}]  # fmt: skip
    of_trl = converted("trl", dataset_name="org/unused", datasets=listed)
    assert data_of(of_trl) == {
        "sources": [
            {"source": "hub:org/a", "subset": "main", "split": "train"}, {"source": "b.jsonl"}, {"source": "c.jsonl"}
        ]
    }  # fmt: skip
    mixture = {"datasets": [{"id": "org/a", "config": "x", "weight": 0.5}, {"id": "b.jsonl", "weight": 1}],
               "seed": 1, "test_split_size": 0.1}  # fmt: skip
    of_open_r1 = converted("trl", dataset_mixture=mixture, eval_strategy="steps")
    assert data_of(of_open_r1) == {
        "sources": [{"source": "hub:org/a", "subset": "x", "weight": 0.5}, {"source": "b.jsonl"}]
    }
    for word in ("weight 0.5: open-r1 takes", "test_split_size: write the rows", "prompts that are not trained on"):
        assert word in reasons(of_open_r1)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"name": "x"}], "needs its path or id"),
        ([{"path": "a/b", "wibble": 1}], "a/b has wibble, which rlhfless does not know"),
        ([{"path": "json"}], "json names no files"),
        ([{"path": "a/b", "data_dir": "d"}], "data_dir of a/b: a job takes all files of a split"),
        ([{"path": "json", "data_files": "a.jsonl", "split": "train[:5]"}], "split train[:5]: take these rows"),
        ([{"path": "a/b", "weight": 0}, {"path": "a/c"}], "sources[0].weight"),
    ],
)
def test_what_a_mixture_has_besides_is_left(entries: Any, words: str) -> None:
    assert words in reasons(converted("trl", datasets=entries))


def test_several_files_of_verl_are_sources() -> None:
    names = ["~/gsm8k/train.parquet", "~/math/train.parquet"]
    conversion = converted("verl", **{"data.train_files": names, "data.val_files": ["~/a.parquet", "~/b.parquet"]})
    assert data_of(conversion) == {"sources": [{"source": name} for name in names]}
    assert data_of(conversion, "evaluation") == {"sources": [{"source": "~/a.parquet"}, {"source": "~/b.parquet"}]}
    assert data_of(converted("verl", **{"data.train_files": "org/math"})) == {"source": "hub:org/math"}


def test_sources_of_openrlhf_have_folders_and_shares() -> None:
    conversion = converted(
        "openrlhf", prompt_data="org/a, json@./d,b.jsonl", prompt_data_probs="0.5,0.3,0.2", prompt_split="x"
    )
    sources = [{"source": "hub:org/a", "split": "x"}, {"source": "./d"}, {"source": "b.jsonl"}]
    assert data_of(conversion) == {"sources": sources}
    assert "write its share × the rows of all sources" in reasons(conversion)
    folder = converted("openrlhf", prompt_data="org/a@d", eval_dataset="org/b,c.jsonl")
    assert data_of(folder) == {"source": "hub:org/a", "split": "train"}
    assert "data_dir of org/a" in reasons(folder)
    assert data_of(folder, "evaluation") == {"sources": [{"source": "hub:org/b", "split": "train"},
                                                         {"source": "c.jsonl"}]}  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "given"),
    [("verl", {"data.train_files": [], "data.val_files": []}), ("openrlhf", {"prompt_data": ",", "eval_dataset": ","}),
     ("openrlhf", {"prompt_data": "@d", "eval_dataset": "@"}),
     ("verl", {"data.train_files": [""], "data.val_files": [""]}),
     ("trl", {"datasets": [{"path": "json", "data_files": [""]}], "eval_strategy": "epoch",
              "eval_dataset": [{"path": ""}]}),
     ("trl", {"datasets": [], "dataset_mixture": {"datasets": []}, "eval_strategy": "epoch"})],
)  # fmt: skip
def test_no_names_are_no_sources_and_the_job_is_valid(peer: str, given: dict[str, Any]) -> None:
    conversion = converted(peer, **given)
    assert data_of(conversion)["source"].startswith("train.")
    assert "evaluation" not in conversion.document["spec"]


# --- Python scripts ---

LOADS: list[tuple[str, dict[str, Any]]] = [
    ('load_dataset("a/b", "main", split="train").shuffle(seed=1)',
     {"source": "hub:a/b", "subset": "main", "split": "train"}),
    ('load_dataset("a/b", name="main", revision="abc")["test"]',
     {"source": "hub:a/b", "subset": "main", "split": "test", "revision": "abc"}),
    ('load_dataset("json", data_files="a.jsonl", split="train")', {"source": "a.jsonl"}),
    ('load_dataset("parquet", data_files={"train": "a.parquet", "test": "b.parquet"})["test"]',
     {"source": "b.parquet"}),
    ('Dataset.from_json("a.jsonl")', {"source": "a.jsonl"}),
    ('concatenate_datasets([first, load_dataset("csv", data_files="c.csv")["train"]])',
     {"sources": [{"source": "hub:o/first", "split": "train"}, {"source": "c.csv"}]}),
    ('first.filter(short)',
     {"source": "hub:o/first", "split": "train", "filter": {"file": "rows.py", "function": "short"}}),
    ('first.map(lambda row: row).select(range(9)).rename_column("a", "prompt")',
     {"source": "hub:o/first", "split": "train", "map": {"file": "rows.py", "function": "turned"},
      "filter": {"file": "rows.py", "function": "kept"}}),
]  # fmt: skip


def script(tmp_path: Path, train: str, more: str = "") -> Conversion:
    file = tmp_path / "train.py"
    file.write_text(
        'first = load_dataset("o/first", split="train")\n'
        f'GRPOTrainer(model="m", args=GRPOConfig(eval_strategy="epoch"), train_dataset={train}{more})\n'
    )
    conversion = convert(read_configuration(file), "train.py", 1)
    parse_job(job_yaml(conversion))
    return conversion


@pytest.mark.parametrize(("train", "written"), LOADS)
def test_data_that_a_script_loads_is_read_with_what_follows(train: str, written: Any, tmp_path: Path) -> None:
    conversion = script(tmp_path, train)
    assert data_of(conversion) == written
    assert ("rows.py" in reasons(conversion)) == ("rows.py" in str(written))


@pytest.mark.parametrize("train", ["interleave_datasets([first, first])", "made()", "concatenate_datasets(parts)"])
def test_data_that_a_script_makes_otherwise_is_left(train: str, tmp_path: Path) -> None:
    conversion = script(tmp_path, train)
    assert data_of(conversion) == {"source": "train.jsonl"}
    assert "the script makes it: write its rows to a file" in reasons(conversion)


def test_evaluation_data_of_a_script_is_its_own(tmp_path: Path) -> None:
    conversion = script(tmp_path, "first", ', eval_dataset=load_dataset("o/held", "main")["test"]')
    assert data_of(conversion, "evaluation") == {"source": "hub:o/held", "subset": "main", "split": "test"}


# --- arguments of the chat template ---


@pytest.mark.parametrize(
    "words",
    ["+data.apply_chat_template_kwargs.enable_thinking=False +data.apply_chat_template_kwargs.a.b=1",
     "'+data.apply_chat_template_kwargs={enable_thinking: false, a: {b: 1}}'",
     "'+data.apply_chat_template_kwargs={enable_thinking:false,a:{b:1}}'"],
)  # fmt: skip
def test_verls_arguments_of_the_template_are_the_jobs(words: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{VERL} data.train_files=a.parquet data.val_files=b.parquet {words}\n")
    conversion = convert(read_configuration(tmp_path / "run.sh"), "run.sh")
    spec = parse_job(job_yaml(conversion)).spec
    assert spec.evaluation is not None
    for data in (spec.data, spec.evaluation.data):
        assert data.chat_template_kwargs == {"enable_thinking": False, "a": {"b": 1}}
    assert conversion.origins["spec.data.chatTemplateKwargs"].startswith("data.apply_chat_template_kwargs.")
