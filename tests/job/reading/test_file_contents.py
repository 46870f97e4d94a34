"""What `validate` finds in the local files of a job, without a GPU and without loading anything."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from rlhfless_operator.job.reading.file_contents import check_contents, not_checked
from rlhfless_operator.job.reading.validation import InvalidJobError, load_job
from tests.job.reading.test_job_files import job

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4", "tests": ["assert double(1) == 2"]}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data that has a prompt, a ground truth and tests."""
    write_rows(tmp_path / "data.jsonl", ROWS)
    return tmp_path


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def model(folder: Path, names: dict[str, tuple[int, ...]] | None = None, **config: Any) -> str:
    import numpy as np

    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    if names is not None:
        tensors = {name: np.zeros(shape, dtype=np.float32) for name, shape in names.items()}
        save_file(tensors, folder / "model" / "model.safetensors")
    return "./model"


def rewards(**kind: Any) -> list[dict[str, Any]]:
    return [{"name": "a", "length": {"bufferTokens": 1}}, {"name": "b", **kind}]


def test_what_fits_has_no_faults(folder: Path) -> None:
    kinds = [{"name": "a", "math": {}}, {"name": "b", "code": {}}, {"name": "c", "exactMatch": {"pattern": "(x)"}}]
    assert check_contents(job(rewards=kinds, evaluation={"data": {"source": "data.jsonl"}}), folder) == []


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"data": {"promptColumn": "q"}}, ("spec", "data", "promptColumn"), "no column 'q'; it has prompt, answer"),
        (
            {"data": {"groundTruthColumn": "x.y"}},
            ("spec", "data", "groundTruthColumn"),
            "no column 'x.y'; it has prompt",
        ),
        (
            {"rewards": rewards(code={"testsColumn": "unit_tests"})},
            ("spec", "rewards", 1, "code", "testsColumn"),
            "no column 'unit_tests', which b takes its tests from; it has prompt, answer, tests",
        ),
    ],
)
def test_a_column_that_is_not_there_is_a_fault(folder: Path, spec: Any, field: Any, words: str) -> None:
    if "data" in spec:
        spec = {"data": {"source": "data.jsonl", **spec["data"]}}
    (fault,) = check_contents(job(**spec), folder)
    assert fault.path == field
    assert words in f"{fault.message}; {fault.remedy}"


def test_an_evaluation_s_own_rewards_are_looked_at_where_they_stand(folder: Path) -> None:
    """With its own data, which training's rewards need not fit."""
    write_rows(folder / "heldout.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    own = {"data": {"source": "heldout.jsonl"}, "rewards": [{"name": "unit", "code": {}}]}
    (fault,) = check_contents(job(rewards=rewards(code={}), evaluation=own), folder)
    assert fault.path == ("spec", "evaluation", "rewards", 0, "code", "testsColumn")


def test_data_without_prompts_or_ground_truth_says_what_it_has(folder: Path) -> None:
    write_rows(folder / "data.jsonl", [{"text": "1+1=", "result": "2"}])
    prompt, truth = check_contents(job(), folder)
    assert (prompt.path, truth.path) == (("spec", "data", "source"), ("spec", "rewards", 0))
    assert "no prompt column (one of prompt, messages, question, problem)" in prompt.message
    assert prompt.remedy == "it has text, result: set promptColumn to one of them"
    assert truth.remedy == "it has text, result: set groundTruthColumn to one of them"
    # A reward of one's own may do without.
    (prompt,) = check_contents(job(rewards=rewards(format={"pattern": "x"})), folder)


def test_a_rehearsal_reads_nothing_but_its_trace(folder: Path) -> None:
    write_rows(folder / "data.jsonl", [{"text": "1+1="}])
    model(folder, LAYERS)
    rehearsed = {"trace": "runs/earlier", "gpu": "H100", "model": "Qwen2.5-7B"}
    assert check_contents(job(model=lora("x"), rewards=rewards(code={}), rehearsal=rehearsed), folder) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x"', "line 4 of {path} is not JSON (Expecting ',' delimiter"),
        ("[1]", "line 4 of {path} holds list, not a JSON object"),
        (
            '{"prompt": "cut \\ud83d", "answer": "one"}',
            "line 4 of {path}: column 'prompt' has half of a surrogate pair",
        ),
    ],
)
def test_a_malformed_line_is_named(folder: Path, line: str, words: str) -> None:
    path = folder / "data.jsonl"
    path.write_text(f"{path.read_text()}\n{line}\n")
    (fault,) = check_contents(job(), folder)
    assert fault.path == ("spec", "data", "source")
    assert words.format(path=path) in fault.message
    assert "one" in fault.remedy or "leave out the row" in fault.remedy


def test_the_evaluations_data_is_looked_at_as_well(folder: Path) -> None:
    write_rows(folder / "held-out.jsonl", [{"question": "x"}])
    (fault,) = check_contents(job(evaluation={"data": {"source": "held-out.jsonl", "promptColumn": "prompt"}}), folder)[
        :1
    ]
    assert fault.path == ("spec", "evaluation", "data", "promptColumn")


def saved(folder: Path, name: str) -> str:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(folder / name)
    return name


def saved_splits(folder: Path, name: str) -> str:
    from datasets import Dataset, DatasetDict

    DatasetDict({"test": Dataset.from_list([{"x": 1}]), "train": Dataset.from_list(ROWS)}).save_to_disk(folder / name)
    return name


def parquet(folder: Path, name: str) -> str:
    from datasets import Dataset

    nested = [{"prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"]}} for row in ROWS]
    Dataset.from_list(nested).to_parquet(folder / f"{name}.parquet")
    return f"{name}.parquet"


def compressed(folder: Path, name: str) -> str:
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress((folder / "data.jsonl").read_bytes()))
    return f"{name}.jsonl.gz"


@pytest.mark.parametrize("write", [saved, saved_splits, parquet, compressed])
def test_columns_are_found_in_every_kind_of_file(folder: Path, write: Callable[[Path, str], str]) -> None:
    source = write(folder, "other")
    assert check_contents(job(data={"source": source}), folder) == []
    (fault,) = check_contents(job(data={"source": source, "promptColumn": "q"}), folder)
    assert "no column 'q'; it has prompt, " in f"{fault.message}; {fault.remedy}"


@pytest.mark.parametrize("name", ["other.parquet", "other.jsonl.gz", "other"])
def test_damaged_data_is_a_fault(folder: Path, name: str) -> None:
    if name == "other":
        (folder / name).mkdir()
        (folder / name / "readme").write_text("x")
    else:
        (folder / name).write_bytes(b"damaged")
    (fault,) = check_contents(job(data={"source": name}), folder)
    assert fault.path == ("spec", "data", "source")
    assert fault.remedy


# --- models ---


LAYERS = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.input_layernorm.weight": (4,),
}


def lora(*targets: str) -> dict[str, Any]:
    return {"source": "./model", "lora": {"targetModules": list(targets)}}


def test_lora_targets_that_the_model_lacks_are_faults(folder: Path) -> None:
    model(folder, LAYERS)
    assert check_contents(job(model=lora("q_proj", "mlp.up_proj", "lm_head")), folder) == []
    assert check_contents(job(model=lora("all-linear")), folder) == []
    lacking, norm = check_contents(job(model=lora("q_proj", "query_key_value", "input_layernorm")), folder)
    assert lacking.path == ("spec", "model", "lora", "targetModules", 1)
    assert lacking.message == f"query_key_value is not a layer of {folder}/model"
    assert lacking.remedy == "name any of q_proj, up_proj, or all-linear"
    assert norm.path[-1] == 2


def test_a_lora_target_that_shares_its_weight_is_a_fault(folder: Path) -> None:
    model(folder, LAYERS, tie_word_embeddings=True)
    (fault,) = check_contents(job(model=lora("q_proj", "lm_head")), folder)
    assert "shares its weight" in fault.message


def test_layers_that_files_do_not_tell_are_left_to_training(folder: Path) -> None:
    model(folder, LAYERS, num_local_experts=4)
    assert check_contents(job(model=lora("w1")), folder) == []
    (folder / "model" / "model.safetensors").unlink()
    model(folder)
    assert check_contents(job(model=lora("w1")), folder) == []


def test_the_tiny_models_own_layers_are_known(tiny_model: Path, folder: Path) -> None:
    targets = {"source": str(tiny_model), "lora": {"targetModules": ["q_proj", "down_proj", "x_proj"]}}
    (fault,) = check_contents(job(model=targets), folder)
    assert fault.message.startswith("x_proj is not a layer")
    assert fault.remedy == "name any of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear"


@pytest.mark.parametrize(
    ("config", "labels"),
    [({"num_labels": 2}, 2), ({"id2label": {"0": "bad", "1": "good", "2": "best"}}, 3), ({"model_type": "qwen2"}, 2)],
)
def test_a_reward_model_has_one_label(folder: Path, config: Any, labels: int) -> None:
    source = model(folder, **config)
    (fault,) = check_contents(job(rewards=rewards(model={"source": source})), folder)
    assert fault.path == ("spec", "rewards", 1, "model", "source")
    assert f"has {labels} labels" in fault.message
    model(folder, id2label={"0": "LABEL_0"})
    assert check_contents(job(rewards=rewards(model={"source": source})), folder) == []


def test_damaged_models_are_faults(folder: Path) -> None:
    source = model(folder)
    (folder / "model" / "config.json").write_text("[")
    assert "is not JSON" in check_contents(job(model={"source": source}), folder)[0].message
    assert "is not JSON" in check_contents(job(rewards=rewards(model={"source": source})), folder)[0].message
    model(folder)
    (folder / "model" / "model.safetensors").write_bytes(b"\x04")
    assert "not a complete safetensors file" in check_contents(job(model=lora("q_proj")), folder)[0].message


# --- what is elsewhere ---


def test_what_is_elsewhere_is_said_to_be_unchecked(folder: Path) -> None:
    whole = job(
        model={"source": "org/model", "tokenizer": "s3://bucket/tokenizer"},
        data={"source": "s3://bucket/data.jsonl"},
        rewards=[{"name": "a", "http": {"url": "http://scores:80"}}, {"name": "b", "model": {"source": "org/reward"}}],
    )
    assert check_contents(whole, folder) == []
    assert not_checked(whole, folder) == [
        "spec.model.source: org/model is on the hub, not on this machine",
        "spec.model.tokenizer: s3://bucket/tokenizer is in a store, not on this machine",
        "spec.rewards[1].model.source: org/reward is on the hub, not on this machine",
        "spec.data.source: s3://bucket/data.jsonl is not on this machine",
        "spec.rewards[0].http.url: http://scores:80 is not on this machine",
    ]


def test_all_of_it_comes_at_once_with_field_and_line(tiny_job: Callable[..., Path]) -> None:
    file = tiny_job(
        rewards=[
            {"name": "form", "format": {"pattern": "(<answer>"}},
            {"name": "same", "exactMatch": {"pattern": "[0-9"}},
            {"name": "unit", "code": {}},
        ],
        model={"lora": {"targetModules": ["query"]}},
        tracking={"mlflow": {"trackingUri": "http://nowhere", "experiment": "e"}},
        data={"promptColumn": "q"},
    )
    with pytest.raises(InvalidJobError) as caught:
        load_job(file, packages=True)
    found = {fault.path: str(fault) for fault in caught.value.faults}
    assert found.keys() == {
        "spec.rewards[0].format.pattern",
        "spec.rewards[1].exactMatch.pattern",
        "spec.rewards[2].code.testsColumn",
        "spec.model.lora.targetModules[0]",
        "spec.tracking.mlflow",
        "spec.data.promptColumn",
    }
    assert (
        "'(<answer>' is not a regular expression (missing ), unterminated subpattern"
        in found["spec.rewards[0].format.pattern"]
    )
    assert "the package mlflow is not installed; pip install mlflow" in found["spec.tracking.mlflow"]
    lines = file.read_text().splitlines()
    for fault in caught.value.faults:
        assert fault.line > 1
    pattern = next(fault for fault in caught.value.faults if fault.path == "spec.rewards[0].format.pattern")
    assert "pattern: (<answer>" in lines[pattern.line - 1]
