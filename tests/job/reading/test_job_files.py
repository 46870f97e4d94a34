"""What `validate` says about the local files that a job names."""

from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.reading.job_files import check_files
from tests.jobs import job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder with everything that a good job names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "reward.py").write_text("async def reward(prompts, **columns):\n    return []\nother = reward\n")
    return tmp_path


def python(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "a", "math": {}}, {"name": "b", "python": fields}]


def test_a_job_whose_files_are_all_there_has_no_faults(folder: Path) -> None:
    whole = job(
        model={"source": "./model", "tokenizer": "model", "chatTemplate": "chat.jinja"},
        rewards=[*python(file="reward.py", function="other"), {"name": "c", "model": {"source": "model"}}],
        evaluation={"data": {"source": "held-out.jsonl"}},
    )
    assert check_files(whole, folder) == []


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"model": {"source": "./nowhere"}}, ("spec", "model", "source"), "does not exist"),
        ({"data": {"source": "data/train.jsonl"}}, ("spec", "data", "source"), "data/train.jsonl does not exist"),
        ({"data": {"source": "./openai/gsm8k"}}, ("spec", "data", "source"), "gsm8k does not exist"),
        (
            {"data": {"source": "openai/gsm8k"}},
            ("spec", "data", "source"),
            "openai/gsm8k is neither a file nor a folder beside the job file",
        ),
        ({"model": {"source": "data.jsonl"}}, ("spec", "model", "source"), "is a file"),
        ({"model": {"source": "."}}, ("spec", "model", "source"), "has no config.json"),
        ({"model": {"source": "a/b/c"}}, ("spec", "model", "source"), "neither a folder nor a hub name"),
        ({"model": {"source": "org/m", "tokenizer": "/no"}}, ("spec", "model", "tokenizer"), "does not exist"),
        (
            {"model": {"source": "org/m", "chatTemplate": "no"}},
            ("spec", "model", "chatTemplate"),
            "neither a file nor a template",
        ),
        ({"model": {"source": "org/m", "chatTemplate": "model"}}, ("spec", "model", "chatTemplate"), "neither a file"),
        (
            {"model": {"source": "org/m", "chatTemplate": "x" * 5000}},
            ("spec", "model", "chatTemplate"),
            "neither a file",
        ),
        ({"data": {"source": "no.jsonl"}}, ("spec", "data", "source"), "does not exist"),
        ({"evaluation": {"data": {"source": "no"}}}, ("spec", "evaluation", "data", "source"), "does not exist"),
        ({"rewards": python(file="no.py")}, ("spec", "rewards", 1, "python", "file"), "does not exist"),
        ({"rewards": python(file="model")}, ("spec", "rewards", 1, "python", "file"), "is not a file"),
        ({"rewards": [{"name": "a", "model": {"source": "./no"}}]}, ("spec", "rewards", 0, "model", "source"), "exist"),
    ],
)
def test_what_is_missing_is_named_with_its_field(folder: Path, spec: Any, field: Any, words: str) -> None:
    (fault,) = check_files(job(**spec), folder)
    assert fault.path == field
    assert words in fault.message
    assert fault.remedy


def test_empty_data_is_a_fault(folder: Path) -> None:
    (folder / "data.jsonl").write_text("")
    (folder / "saved").mkdir()
    assert "is empty" in check_files(job(), folder)[0].message
    assert "is empty" in check_files(job(data={"source": "saved"}), folder)[0].message


def test_a_reward_function_must_be_in_its_file(folder: Path) -> None:
    (misspelt,) = check_files(job(rewards=python(file="reward.py", function="rewards")), folder)
    assert misspelt.path == ("spec", "rewards", 1, "python", "function")
    assert misspelt.remedy == "did you mean reward?"
    (absent,) = check_files(job(rewards=python(file="reward.py", function="score_all")), folder)
    assert absent.remedy == "it has reward"


def test_a_files_only_reward_needs_no_name(folder: Path) -> None:
    verl = "def compute_score(data_source, solution_str, ground_truth, extra_info): ...\n"
    (folder / "reward.py").write_text("def extract(solution_str): ...\n" + verl)
    assert check_files(job(rewards=python(file="reward.py")), folder) == []
    (folder / "reward.py").write_text(verl + "def reward_func(queries, prompts, labels): ...\ndef _pool(): ...\n")
    (fault,) = check_files(job(rewards=python(file="reward.py")), folder)
    assert fault.message.endswith("has no function reward")
    assert fault.remedy == "it has compute_score, reward_func: set python.function to one of them"


@pytest.mark.parametrize(
    "code",
    [
        "from elsewhere import reward\n",
        "from elsewhere import *\n",
        "import elsewhere as reward\n",
        "class Reward:\n    pass\nreward = Reward()\n",
        "reward: object = print\n",
        "if True:\n    def reward(): ...\nelse:\n    reward = None\n",
        "try:\n    from fast import reward\nexcept ImportError:\n    from slow import reward\n",
    ],
)
def test_a_reward_function_may_come_from_anywhere_in_the_file(folder: Path, code: str) -> None:
    (folder / "reward.py").write_text(code)
    assert check_files(job(rewards=python(file="reward.py")), folder) == []


@pytest.mark.parametrize("code", [b"def reward(:\n", b"\x00", b"\xff", b"# coding: nonsense\n"])
def test_a_reward_file_must_be_python(folder: Path, code: bytes) -> None:
    (folder / "reward.py").write_bytes(code)
    (fault,) = check_files(job(rewards=python(file="reward.py")), folder)
    assert "is not valid Python" in fault.message


def test_what_lies_elsewhere_is_not_looked_at(folder: Path) -> None:
    spec: dict[str, Any] = {
        "model": {"source": "s3://bucket/model"},
        "data": {"source": "s3://bucket/data.jsonl"},
        "rewards": python(file="s3://bucket/reward.py"),
    }
    assert check_files(job(**spec), folder) == []


def test_a_dataset_of_the_hub_is_named_with_how_to_have_it(folder: Path) -> None:
    [fault] = check_files(job(data={"source": "openai/gsm8k"}), folder)
    assert "write hub:openai/gsm8k" in fault.remedy
    assert "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k" in fault.remedy
    assert check_files(job(data={"source": "hf://datasets/openai/gsm8k/main/train.parquet"}), folder) == []
