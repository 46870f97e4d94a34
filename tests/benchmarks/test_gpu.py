"""The GPU benchmark counts operations as it says, and runs on any machine as the command that it is."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu.attempts import failures
from benchmarks.gpu.conformance import counted
from benchmarks.gpu.flops import Parameters, Passed, count_parameters, passed, training_flops
from benchmarks.gpu.job import job_document
from benchmarks.gpu.measure import ALL, LIMITS, PARTS, wanted_work
from benchmarks.gpu.shapes import SHAPES, WORK, make_model, save_model
from rlhfless_operator.job.spec import RLHFJob

COMMAND = Path(__file__).parents[2] / "benchmarks" / "gpu" / "measure.py"


def model(*, tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


# Queries and output 4 × 4, keys and values 4 × 2, biases of the first three, three matrices 4 × 6, two norms.
LAYER = 2 * 16 + 2 * 8 + (4 + 2 + 2) + 3 * 24 + 2 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_that_tokens_are_multiplied_with(tied: bool) -> None:
    assert count_parameters(model(tied=tied)) == Parameters(
        body=3 * LAYER + 4, head=10 * 4, adapter=0, layers=3, width=4
    )


def test_an_adapter_is_counted_by_itself() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model(tied=True), LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
    # Rank 1 adds inputs + outputs of a matrix.
    of_a_layer = 2 * (4 + 4) + 2 * (4 + 2) + 3 * (4 + 6)
    assert count_parameters(adapted) == Parameters(
        body=3 * LAYER + 4, head=10 * 4, adapter=3 * of_a_layer, layers=3, width=4
    )


def test_a_batch_is_counted_by_tokens_logits_and_what_tokens_see() -> None:
    # 3 + 2 tokens see 1 + 2 + 3 + 4 + 5 tokens, 3 + 1 tokens 1 + 2 + 3 + 4.
    assert passed([(3, [2, 1])], share_prompts=False) == Passed(tokens=9, logits=3, pairs=15 + 10)
    # The prompt's 1 + 2 + 3 once, then 4 + 5, and 4.
    assert passed([(3, [2, 1])], share_prompts=True) == Passed(tokens=6, logits=3, pairs=6 + 9 + 4)
    assert passed([(3, [2, 1]), (1, [1])], share_prompts=True) == Passed(tokens=8, logits=4, pairs=19 + 3)


def test_all_weights_take_six_operations_for_each_parameter_and_token() -> None:
    parameters = Parameters(body=100, head=10, adapter=0, layers=3, width=4)
    expected = 6 * (100 * 9 + 10 * 3) + 12 * 3 * 4 * 25
    assert training_flops(parameters, Passed(tokens=9, logits=3, pairs=25)) == expected


def test_a_frozen_parameter_takes_four_and_the_adapter_six() -> None:
    parameters = Parameters(body=100, head=10, adapter=7, layers=3, width=4)
    expected = 4 * (100 * 9 + 10 * 3) + 6 * 7 * 9 + 12 * 3 * 4 * 25
    assert training_flops(parameters, Passed(tokens=9, logits=3, pairs=25)) == expected


@pytest.mark.parametrize(("name", "billions"), [("0.5b", 0.494), ("3b", 3.086), ("7b", 7.616)])
def test_the_shapes_are_as_large_as_the_models_that_they_are_named_after(name: str, billions: float) -> None:
    import torch

    made = make_model(SHAPES[name], torch.bfloat16, torch.device("meta"), seed=0)
    assert sum(parameter.numel() for parameter in made.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_the_peak_is_that_of_the_device_or_unknown() -> None:
    from benchmarks.gpu.accelerator import data_sheet_flops

    assert data_sheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert data_sheet_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert data_sheet_flops("NVIDIA L40S") == 362e12
    assert data_sheet_flops("NVIDIA H100 PCIe") is None
    assert data_sheet_flops("NVIDIA GeForce RTX 4090") is None


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_shape_s_job_is_a_job(name: str, tmp_path: Path) -> None:
    document = job_document(name, "vllm", "bfloat16", tmp_path, tmp_path / "prompts", tmp_path / "reward.py")
    spec = RLHFJob.model_validate(document).spec
    assert spec.batch.prompts_per_step * spec.batch.samples_per_prompt == WORK[name].samples
    assert WORK[name].samples % WORK[name].micro_batch == 0
    assert (spec.model.lora.rank if spec.model.lora else None) == WORK[name].lora_rank


@pytest.mark.nightly
def test_the_command_measures_keeps_and_goes_on(tmp_path: Path) -> None:
    kept = tmp_path / "result.json"
    command = [sys.executable, str(COMMAND), "--threads", "1", "--shapes", "tiny-lora", "--parts", "learner,weights"]
    command += ["--json", str(kept), "--continue"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "MFU" in ran.stdout and "taken over by transformers" in ran.stdout
    result = json.loads(kept.read_text())
    parts = result["shapes"]["tiny-lora"]["parts"]
    learner, weights = parts["learner"], parts["weights"]
    assert learner["mfu"] == pytest.approx(learner["flops_per_second"] / learner["peak_flops"]["matmul"])
    assert 0 < learner["mfu"] < 1
    assert 0 < learner["tokens_passed"] <= learner["tokens"]
    taken = weights["engines"]["transformers"]
    assert taken["gigabytes_per_second"] == pytest.approx(weights["bytes"] / taken["seconds"] / 1e9)

    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "learner ..." in ran.stderr and "learner ..." not in again.stderr
    assert json.loads(kept.read_text()) == result


def test_one_option_measures_everything_and_is_rehearsed_with_other_shapes() -> None:
    assert wanted_work(None, [], everything=True) == list(ALL)
    assert len(set(ALL)) == len(ALL) and {part for part, _ in ALL} == LIMITS.keys() - {"model"}
    rehearsed = wanted_work(["tiny", "small"], [], everything=True)
    assert rehearsed[:3] == [("conformance", "tiny"), ("learner", "tiny"), ("learner", "small")]
    assert len(rehearsed) == 1 + 2 * len(PARTS)
    assert wanted_work(None, ["step"], everything=False) == [("step", "0.5b"), ("step", "7b")]


@pytest.mark.parametrize("whole", range(len(ALL) + 4))
def test_what_was_measured_before_a_cut_after_any_part_is_kept(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the parts of `--all`, with the models of three shapes and one more call than there are."""
    kept, begun = tmp_path / "result.json", []

    def measured(part: str, name: str, *rest: object) -> dict[str, Any]:
        if len(begun) == whole:
            raise KeyboardInterrupt
        begun.append((name, part))
        return {"part_seconds": 1.0}

    monkeypatch.setattr(gpu_measure, "measure_part", measured)
    monkeypatch.setattr(gpu_measure, "table", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["measure.py", "--all", "--json", str(kept)])
    if whole == len(ALL) + 3:
        gpu_measure.main()
    else:
        with pytest.raises(KeyboardInterrupt):
            gpu_measure.main()
    shapes = json.loads(kept.read_text())["shapes"] if whole else {}
    assert [(name, part) for name, shape in shapes.items() for part in shape["parts"]] == sorted(
        begun, key=lambda each: list(shapes).index(each[0])
    )

    # Another run measures what is missing. It has the models to make again.
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--continue"])
    before, whole = list(begun), 10**6
    gpu_measure.main()
    again = [(part, name) for name, part in begun[len(before) :] if part != "model"]
    assert again == [(part, name) for part, name in ALL if (name, part) not in before]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_a_command_that_is_ended_leaves_what_was_measured_and_no_part_that_goes_on(
    tmp_path: Path, end: signal.Signals
) -> None:
    kept = tmp_path / "result.json"
    command = [sys.executable, str(COMMAND), "--threads", "1", "--shapes", "tiny", "--parts", "learner"]
    with subprocess.Popen([*command, "--json", str(kept)], stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert any("learner ..." in line for line in running.stderr)
        # The line says that the part begins, and its process is not there yet.
        while not (parts := psutil.Process(running.pid).children()):
            assert running.poll() is None
            time.sleep(0.01)
        (part,) = parts
        running.send_signal(end)
        running.wait(60)
    psutil.wait_procs([part], timeout=60)
    assert not part.is_running()
    assert list(json.loads(kept.read_text())["shapes"]["tiny"]["parts"]) == ["model"]


def test_a_model_is_made_when_it_is_first_needed_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def measured(part: str, name: str, *rest: object) -> dict[str, Any]:
        begun.append(f"{part} {name}")
        return {"failed": "no memory"} if begun[-1] == "model small" else {}

    monkeypatch.setattr(gpu_measure, "measure_part", measured)
    result = gpu_measure.empty_result(["tiny", "small"], 1)
    work = [("learner", "tiny"), ("conformance", "tiny"), ("sleep", "tiny"), ("learner", "small"), ("sleep", "small")]
    gpu_measure.measure(result, work, tmp_path, 60, lambda _: None)
    assert begun == ["model tiny", "learner tiny", "conformance tiny", "sleep tiny", "model small"]
    assert result["shapes"]["small"]["parts"]["sleep"] == {"failed": "there is no model"}


def test_conformance_is_counted_by_the_tests_ends(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = '<testcase name="a"/><testcase name="b"><skipped/></testcase><testcase name="c"><failure/></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert counted(report) == {"passed": 1, "skipped": 1, "broken": ["c"], "failed": "1 of 3 tests, the first c"}


@pytest.mark.slow
def test_decoding_is_measured_by_the_number_of_sequences(tmp_path: Path) -> None:
    import torch

    from benchmarks.gpu import decode

    save_model(SHAPES["tiny"], tmp_path / "model", torch.float32, torch.device("cpu"))
    found = decode.measure("tiny", tmp_path / "model")["engines"]["transformers"]
    assert list(found["tokens_per_second"]) == ["1", "8"]
    assert all(speed > 0 for speed in found["tokens_per_second"].values())


def test_failures_are_found_wherever_they_are() -> None:
    measured = {
        "7b": {"weights": {"bytes": 1, "engines": {"vllm": {"failed": "no memory"}}}, "trl": {"not_measured": "x"}}
    }
    assert list(failures(measured)) == ["7b: weights: engines: vllm failed: no memory"]
