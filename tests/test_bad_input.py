"""Bad input through the real command line: one error that names the field and the remedy, nothing half-written, no
process left, and the same command goes on once the input is mended.

What a document alone shows is checked in this process, since no other is involved; the rest runs `python -m
rlhfless_operator`. Of the faults that stage code finds, each family is here once: the others are in `test_datasets`,
`test_preparation`, `test_rewards_pool`, `test_rewards_scoring`, `test_training_step` and `test_weights_policy`.
"""

import ctypes
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM

from rlhfless_operator.cli import main
from tests.command_line import run_command
from tests.training.whole_jobs import MakeJob, folder_of, half_written, status_of

_PR_SET_CHILD_SUBREAPER = 36


pytestmark = pytest.mark.usefixtures("warm_start")


@pytest.fixture(autouse=True, scope="module")
def orphans_come_here() -> Iterator[None]:
    """Make this process the parent of the processes that its children leave behind, to find them."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def living_children() -> dict[int, str]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def run(file: Path, *options: str, limit: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    """`rlhfless run`, after which no process may be left."""
    before = living_children()
    ended = subprocess.run(run_command(file, *options), capture_output=True, text=True, timeout=200, preexec_fn=limit)
    left = {pid: command for pid, command in living_children().items() if pid not in before}
    assert left == {}
    return ended


def the_error(ended: subprocess.CompletedProcess[str]) -> str:
    """The one error that a failed run ends with."""
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[-1].startswith("error: "), ended.stderr
    assert sum("error" in line.lower() for line in lines) == 1, ended.stderr
    return lines[-1]


def assert_failed(file: Path, message: str) -> None:
    """The job's folder says why it failed, and holds nothing half-written."""
    status = status_of(file)
    assert status["phase"] == "Failed"
    assert f"error: {status['message']}" == message
    assert json.loads((folder_of(file) / "summary.json").read_text())["phase"] == "Failed"
    assert half_written(folder_of(file)) == []


# --- what the document shows ---


@pytest.mark.parametrize(
    ("settings", "files", "place", "remedy"),
    [
        ({"stepz": 3}, {}, "spec.stepz: ", "did you mean steps?"),
        ({"steps": "three"}, {}, "spec.steps: ", "whole number"),
        ({"limits": {"stall": 30}}, {}, "spec.limits.stall: ", "30s"),
        ({"model": {"source": "./nowhere"}}, {}, "spec.model.source: ", "check the path"),
        ({"data": {"source": "nowhere.jsonl"}}, {}, "spec.data.source: ", "check the path"),
        ({"data": {"source": "empty.jsonl"}}, {"empty.jsonl": ""}, "spec.data.source: ", "at least one prompt"),
        (
            {"rewards": [{"name": "r", "python": {"file": "nowhere.py"}}]},
            {},
            "spec.rewards[0].python.file: ",
            "check the path",
        ),
        (
            {"rewards": [{"name": "r", "python": {"file": "reward.py", "function": "rewrad"}}]},
            {},
            "spec.rewards[0].python.function: ",
            "did you mean reward?",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("spec.") else "",
)
def test_a_faulty_document_is_one_line_and_nothing_is_made(
    tiny_job: MakeJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    files: dict[str, str],
    place: str,
    remedy: str,
) -> None:
    file = tiny_job(**settings)
    for name, content in files.items():
        (file.parent / name).write_text(content)
    monkeypatch.setattr(sys, "argv", ["rlhfless", "run", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file}:")
    assert place in line
    assert remedy in line
    assert not (tmp_path / "runs").exists()


# --- what the data shows ---


@pytest.mark.slow
def test_data_that_cannot_be_used_is_one_error_and_the_mended_job_goes_on(tiny_job: MakeJob, tiny_model: Path) -> None:
    short = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4}, "steps": 1}

    # A prompt that is too long, where the job says that this is a fault.
    file = tiny_job(**short, data={"longPrompts": "fail"})
    with (file.parent / "train.jsonl").open("a") as data:
        data.write(json.dumps({"prompt": "1+" * 20, "ground_truth": 1}))
    error = the_error(run(file))
    assert "train.jsonl, line 13 has a prompt of 40 tokens" in error
    assert "set data.longPrompts to drop" in error
    assert_failed(file, error)

    # Chat messages, which the model's tokenizer has no template for.
    file = tiny_job(**short, data={"systemPrompt": "add"})
    error = the_error(run(file))
    assert "train.jsonl, line 1: column 'prompt' is chat" in error
    assert "set model.chatTemplate" in error
    assert_failed(file, error)

    # A tokenizer that knows more tokens than the model.
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["one-too-many"])
    tokenizer.save_pretrained(file.parent / "tokenizer")
    file = tiny_job(**short, model={"tokenizer": "./tokenizer"})
    error = the_error(run(file))
    assert "vocabulary mismatch" in error
    assert "give model.tokenizer the tokenizer that the model was trained with" in error
    assert_failed(file, error)

    file = tiny_job(**short)
    ended = run(file)
    assert ended.returncode == 0, ended.stderr
    assert status_of(file)["phase"] == "Succeeded"


# --- what the work shows ---


@pytest.mark.slow
def test_a_job_goes_on_from_every_fault_of_its_steps(tiny_job: MakeJob) -> None:
    short: dict[str, Any] = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 2}}

    def with_reward(body: str, steps: int, **settings: Any) -> Path:
        terms = [{"name": "digits", "timeout": "1s", "python": {"file": "reward.py"}}]
        file = tiny_job(**short, rewards=terms, steps=steps, **settings)
        (file.parent / "reward.py").write_text(f"def reward(completions, **columns):\n    {body}\n")
        return file

    fine = "return [len(completion) / 24 for completion in completions]"
    for body, complaint in (
        ("raise ValueError('no such unit')", "raised ValueError: no such unit (reward.py, line 2)"),
        ("import time; time.sleep(600)", "took longer than 1 s"),
    ):
        file = with_reward(body, steps=1)
        error = the_error(run(file))
        assert error.startswith(f"error: reward 'digits' {complaint}")
        assert "correct it, or set its onError to unscorable" in error
        assert_failed(file, error)
        assert status_of(file)["step"] == 0

    file = with_reward(fine, steps=1)
    ended = run(file)
    assert ended.returncode == 0, ended.stderr

    file = with_reward(fine, steps=2, optimizer={"learningRate": 1e30})
    error = the_error(run(file))
    assert "step 2" in error
    assert "optimizer.learningRate" in error
    assert_failed(file, error)
    status = status_of(file)
    assert status["step"] == status["weights"]["version"] == 1
    assert [path.name for path in (folder_of(file) / "weights").iterdir()] == ["step-000001"], "the last good weights"

    file = with_reward(fine, steps=2)
    ended = run(file)
    assert ended.returncode == 0, ended.stderr
    assert "resuming after step 1" in ended.stderr
    assert "step 1/2" not in ended.stderr, "that was said when it was done"
    assert status_of(file)["step"] == 2


# --- what the model shows ---


def bloom(folder: Path, tokenizer_from: Path) -> Path:
    """A decoder whose attention the transformers engine has not."""
    torch.manual_seed(0)
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder)
    return folder


def other_weights(folder: Path) -> None:
    """Weights of the same shapes, trained otherwise, in the place of a model's."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


@pytest.mark.slow
def test_a_model_that_cannot_be_used_is_one_error_and_the_mended_job_goes_on(
    tiny_job: MakeJob, tiny_model: Path, tmp_path: Path
) -> None:
    short = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4}, "steps": 1}

    # A model that the engine can't load, though preparation could.
    given = bloom(tmp_path / "bloom", tiny_model)
    file = tiny_job(**short, model={"source": str(given)})
    error = the_error(run(file))
    assert "needs a model with scaled dot-product attention; bloom has" in error
    assert_failed(file, error)

    # A file that ends too early.
    given = Path(shutil.copytree(tiny_model, tmp_path / "cut"))
    content = (given / "model.safetensors").read_bytes()
    (given / "model.safetensors").write_bytes(content[:-100])
    file = tiny_job(**short, model={"source": str(given)})
    error = the_error(run(file))
    assert f"{given} cannot be loaded" in error
    assert "give a folder of safetensors weights that belong to its config.json" in error
    assert_failed(file, error)

    # A cache without room for one sequence.
    file = tiny_job(**short, generation={"kvBudgetTokens": 20})
    error = the_error(run(file))
    assert "holds 20; raise generation.kvBudgetTokens" in error
    assert_failed(file, error)

    file = tiny_job(**short, generation={"kvBudgetTokens": 100})
    ended = run(file)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_weights_that_are_not_what_was_published_are_one_error_and_the_restored_job_goes_on(tiny_job: MakeJob) -> None:
    short = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4}}
    assert run(tiny_job(**short, steps=1)).returncode == 0
    file = tiny_job(**short, steps=2)
    weights = Path(status_of(file)["weights"]["uri"]) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    error = the_error(run(file))
    assert f"{weights} is corrupt (its checksum is not the manifest's)" in error
    assert_failed(file, error)
    assert status_of(file)["step"] == 1
    weights.write_bytes(content)
    ended = run(file)
    assert ended.returncode == 0, ended.stderr
    assert "resuming after step 1" in ended.stderr


@pytest.mark.slow
def test_a_base_that_changed_under_its_adapter_is_one_error_and_the_job_goes_on_with_its_own(
    tiny_job: MakeJob, tiny_model: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    short: dict[str, Any] = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4}}
    short |= {"model": {"source": str(source), "lora": {"rank": 2}}}
    assert run(tiny_job(**short, steps=1)).returncode == 0
    file = tiny_job(**short, steps=2)
    other_weights(source)
    error = the_error(run(file))
    assert f"the content of {source} (spec.model.source) changed" in error
    assert "undo the change" in error
    assert status_of(file)["step"] == 1
    shutil.copy(tiny_model / "model.safetensors", source)
    ended = run(file)
    assert ended.returncode == 0, ended.stderr
    assert "resuming after step 1" in ended.stderr


# --- where the artifacts go ---


@pytest.mark.usefixtures("cold_start")
def test_an_artifacts_folder_that_cannot_be_made_is_one_error(tiny_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    file = tiny_job(artifacts={"uri": str(tmp_path / "file" / "runs")})
    error = the_error(run(file))
    assert f"{tmp_path}/file/runs" in error
    assert "choose another URI" in error
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Callable[[], None] | None]]:
    """A folder with little space, and what a process must call first for that.

    A tmpfs of its own where this user may mount one. Elsewhere a limit on the size of the process' files stands in
    for it, which fails the same large writes, with another errno, and no small ones.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        request.getfixturevalue("cold_start")
        yield folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        return
    yield folder, None
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_error(tiny_job: MakeJob, small_disk: tuple[Path, Callable[[], None] | None]) -> None:
    folder, limit = small_disk
    short = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4}, "steps": 1}
    file = tiny_job(**short, artifacts={"uri": str(folder)})
    error = the_error(run(file, limit=limit))
    assert ("no space is left" if limit is None else "no file may be that large") in error
    assert "choose another artifacts URI" in error
    assert f"{folder}/tiny/" in error
    assert half_written(folder / "tiny") == []
    assert_failed(file, error)
