"""Whole jobs on this machine: real processes, real streams, real training of a tiny model."""

import json
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless_operator.cli import main
from rlhfless_operator.local.local_run import JobFinishedError
from rlhfless_operator.planner.moves.migration import Actor, Move
from rlhfless_operator.training.costs import live_migration as migration
from rlhfless_operator.training.driver import JobChangedError
from rlhfless_operator.training.journal.lease import Lease, LeaseHeldError
from rlhfless_operator.training.journal.ledger import CHARGED_STATES
from rlhfless_operator.training.stages import generation_settings
from tests.generation.engines.shares import save_model
from tests.model.families import FAMILIES, save
from tests.training.whole_jobs import (
    MakeJob,
    assert_same_final_weights,
    final_weights,
    folder_of,
    half_written,
    records_of,
    run_job,
    run_until_a_step_cannot_be_written,
    status_of,
)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def test_a_job_trains_and_leaves_what_it_promises(tiny_job: MakeJob) -> None:
    file = tiny_job(evaluation={"data": {"source": "train.jsonl"}, "samplesPerPrompt": 2})
    summary = run_job(file)
    folder = folder_of(file)
    assert json.loads((folder / "summary.json").read_text()) == summary
    for name in ("steps", "seconds", "gpu_seconds", "cost", "reward_first", "reward_last"):
        assert summary[name] is not None
    assert {"held_out_reward_before", "held_out_reward_after"} <= summary.keys()
    assert summary["phase"] == "Succeeded"
    records = records_of(file)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["plan"]["actors"] == 2 for record in records[1:])
    assert all(record["metrics"]["weights/bytes"] > 0 for record in records[1:])
    assert all(record["metrics"]["weights/seconds"] > 0 for record in records[1:])
    assert half_written(folder) == []
    assert "<html" in (folder / "report.html").read_text()

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trained = final_weights(file)
    assert torch.equal(model.state_dict()["model.norm.weight"], trained["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(folder / "model").decode([2, 3]) == "01"
    assert (folder / "model" / "generation_config.json").exists()
    assert "grpo" in (folder / "model" / "README.md").read_text().lower()

    with pytest.raises(JobFinishedError, match=r"finished all of its 3 steps"):
        run_job(file)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("minibatch", [8, 16], ids=["old log-probs of preparation", "of learning"])
def test_the_engine_agrees_with_the_trainer_in_every_step(
    tiny_job: MakeJob, tiny_model: Path, tmp_path: Path, dtype: str, minibatch: int
) -> None:
    """On a model whose distributions really depend on the context, the critic's warm-up included."""
    model = save_model(tmp_path / "model", tiny_model)
    file = tiny_job(
        model={"source": str(model), "dtype": dtype},
        algorithm={"name": "ppo", "critic": {"warmupSteps": 1}, "kl": {"coefficient": 0.0}},
        batch={"minibatchSamples": minibatch},
    )
    run_job(file)
    records = records_of(file)
    gaps = {record["step"]: record["metrics"]["mismatch/mean_exp_abs"] for record in records if record["step"]}
    assert gaps.keys() == {1, 2, 3}
    assert all(1 <= gap < (1.01 if dtype == "float32" else 1.05) for gap in gaps.values())
    assert "Engine against trainer" in (folder_of(file) / "report.html").read_text()


def test_the_ledger_adds_up_to_the_lifetimes_of_the_instances(tiny_job: MakeJob) -> None:
    file = tiny_job(steps=2, generation={"keepAlive": "0s"})
    summary = run_job(file)
    spans = [json.loads(line) for line in (folder_of(file) / "ledger.jsonl").read_text().splitlines()]
    charged = sum(span["end"] - span["start"] for span in spans)
    assert summary["instance_seconds"] == pytest.approx(charged, rel=1e-3)
    steps = sum(
        sum(account[state] for state in CHARGED_STATES)
        for record in records_of(file)
        for account in record["ledger"].values()
    )
    assert steps == pytest.approx(charged, rel=1e-3)
    by_instance: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        by_instance.setdefault(span["instance"], []).append((span["start"], span["end"]))
    generation = [name for name in by_instance if name.startswith("generation")]
    assert len(generation) >= 4, "two instances a step, ended with their shares"
    for name, pieces in by_instance.items():
        pieces.sort()
        lifetime = pieces[-1][1] - pieces[0][0]
        assert sum(end - start for start, end in pieces) == pytest.approx(lifetime, abs=1e-4), name
    last = {span["instance"]: span["state"] for span in sorted(spans, key=lambda span: span["start"])}
    assert set(last.values()) == {"draining"}, "the export and its instance's end are charged, too"
    states = {span["state"] for span in spans}
    assert {"starting", "busy", "draining"} <= states


class Shuffle:
    """Gathers all samples on one actor, then gives half of them to a new one, and so on."""

    def __init__(self) -> None:
        self.looks = 0

    def due(self, actors: Collection[Actor], now: float) -> bool:
        return True

    def decide(self, actors: Sequence[Actor], now: float) -> list[Move]:
        self.looks += 1
        if len(actors) > 1:
            return [Move(actor.name, tuple(actor.samples), actors[-1].name) for actor in actors[:-1]]
        keys = tuple(actors[0].samples)
        return [Move(actors[0].name, keys[::2], None)] if self.looks % 2 else []


@pytest.fixture(scope="module")
def on_one_actor(shared_tiny_job: MakeJob) -> Path:
    """A job of two steps, each generated by one actor."""
    file = shared_tiny_job("one", steps=2, generation={"instances": {"max": 1}})
    run_job(file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instances", "planning"),
    [
        (3, {"policy": "cost", "lambda": 0.0, "migration": {"policy": "benefit", "hysteresis": 0.0}}),
        (4, {"policy": "even", "migration": {"policy": "threshold", "ratio": 0.25}}),
        (3, {"policy": "even", "migration": {"policy": "repack", "period": "1ms", "slots": 16}}),
    ],
)
def test_the_plan_never_changes_what_is_learnt(
    tiny_job: MakeJob, on_one_actor: Path, instances: int, planning: dict[str, Any]
) -> None:
    file = tiny_job("other", steps=2, generation={"instances": {"min": 1, "max": instances}}, planning=planning)
    run_job(file)
    assert_same_final_weights(file, on_one_actor)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3, experts", "qwen1.5, experts, window 0 that no layer uses"])
def test_the_number_of_actors_changes_no_bit_of_experts(
    tiny_job: MakeJob, tiny_model: Path, tmp_path: Path, family: str
) -> None:
    model = save(FAMILIES[family], tmp_path / "experts", tiny_model)
    files = [
        tiny_job(
            f"actors-{actors}",
            steps=2,
            model={"source": str(model)},
            planning={"policy": "even"},
            generation={"instances": {"min": actors, "max": actors}},
        )
        for actors in (1, 3)
    ]
    for file in files:
        run_job(file)
    assert_same_final_weights(*files)
    one, other = (
        [{n: v for n, v in record["metrics"].items() if n.startswith("mismatch/")} for record in records_of(file)]
        for file in files
    )
    assert one == other


def test_moving_samples_about_never_changes_what_is_learnt(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough, and with looks that are frequent enough, to find samples that decode on every actor.
    longer = {"sampling": {"maxResponseTokens": 96}}
    monkeypatch.setattr(
        generation_settings, "GenerationSettings", partial(generation_settings.GenerationSettings, look_seconds=0.0)
    )
    on_one_actor = tiny_job("one", steps=2, **longer, generation={"flush": "1ms", "instances": {"max": 1}})
    run_job(on_one_actor)
    monkeypatch.setattr(migration, "_rule", lambda *arguments: Shuffle())
    three = {"min": 3, "max": 3}
    file = tiny_job(
        "shuffled", steps=2, planning={"policy": "even"}, **longer, generation={"flush": "1ms", "instances": three}
    )
    run_job(file)
    assert_same_final_weights(file, on_one_actor)
    records = records_of(file)
    assert sum(record["metrics"]["generation/cuts"] for record in records) > 0
    assert sum(record["metrics"]["generation/moved_samples"] for record in records) > 0


@pytest.mark.slow
def test_a_step_that_was_not_written_down_is_taken_again(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step has begun by then, with weights that nobody knows of."""
    undisturbed = tiny_job("undisturbed", steps=4)
    run_job(undisturbed)
    file = tiny_job("disturbed", steps=4)
    folder = folder_of(file)
    run_until_a_step_cannot_be_written(
        file, monkeypatch, 2, lambda: bool(list((folder / "rollouts" / "step-000003").rglob("*.parquet")))
    )
    status = status_of(file)
    assert (status["phase"], status["step"], status["message"]) == ("Failed", 1, "the disk is full")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 1
    assert (folder / "rollouts" / "step-000003").exists()
    assert run_job(file)["steps"] == 4
    assert_same_final_weights(file, undisturbed)


@pytest.mark.slow
def test_a_longer_job_goes_on_from_a_finished_one(tiny_job: MakeJob) -> None:
    straight = tiny_job("straight", steps=3)
    run_job(straight)
    file = tiny_job("prolonged", steps=2)
    run_job(file)
    file = tiny_job("prolonged", steps=3)
    assert run_job(file)["steps"] == 3
    assert_same_final_weights(file, straight)
    exported = load_file(folder_of(file) / "model" / "model.safetensors")
    assert torch.equal(exported["model.norm.weight"], final_weights(file)["model.norm.weight"])


def test_a_job_that_changed_is_refused(tiny_job: MakeJob) -> None:
    run_job(tiny_job(steps=1))
    file = tiny_job(steps=2, sampling={"temperature": 0.7})
    with pytest.raises(JobChangedError, match=r"spec\.sampling changed since this job was begun"):
        run_job(file)


def test_two_drivers_on_one_job(tiny_job: MakeJob) -> None:
    file = tiny_job()
    held = Lease.acquire(str(folder_of(file)))
    with pytest.raises(LeaseHeldError, match="is driven by process"):
        run_job(file)
    held.release()


@pytest.mark.parametrize("level", ["token", "sequence_product", "geometric_mean"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "none"])
def test_every_importance_correction_goes_through_the_same_loop(tiny_job: MakeJob, mode: str, level: str) -> None:
    """In bfloat16, where engine and trainer differ by more than these bounds allow."""
    correction = {"mode": mode, "level": level, "low": 0.9999, "high": 1.0001}
    file = tiny_job(steps=1, model={"dtype": "bfloat16"}, algorithm={"name": "grpo", "importanceSampling": correction})
    run_job(file)
    metrics = records_of(file)[-1]["metrics"]
    shares = [metrics.get(f"mismatch/corrected_fraction_{side}") for side in ("low", "high")]
    if mode == "none":
        assert shares == [None, None]
    else:
        assert 0 < sum(shares) <= 1


def test_what_is_masked_and_a_penalty_in_the_reward_go_through_the_same_loop(tiny_job: MakeJob) -> None:
    kl = {"coefficient": 0.05, "placement": "reward"}
    file = tiny_job(steps=2, algorithm={"name": "dr_grpo", "maskTruncated": True, "kl": kl})
    run_job(file)
    assert all("kl/reference" in record["metrics"] for record in records_of(file) if record["step"])


@pytest.mark.parametrize("algorithm", ["ppo", "dapo", "reinforce_plus_plus", "gmpo", "sapo"])
def test_other_algorithms_go_through_the_same_loop(tiny_job: MakeJob, algorithm: str) -> None:
    file = tiny_job(steps=2, algorithm={"name": algorithm, "kl": {"coefficient": 0.0}})
    summary = run_job(file)
    assert summary["steps"] == 2
    assert summary["algorithm"] == algorithm


@pytest.mark.slow
def test_lora_ships_adapters_alone(tiny_job: MakeJob, tiny_model: Path) -> None:
    file = tiny_job(steps=2, model={"lora": {"rank": 4}})
    run_job(file)
    status = status_of(file)
    assert status["weights"]["adapter"]
    assert status["weights"]["uri"] == str(tiny_model)
    AutoModelForCausalLM.from_pretrained(folder_of(file) / "model")


def test_a_finished_job_whose_document_changed_says_what_changed(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_job(tiny_job(steps=1))
    file = tiny_job(steps=1, optimizer={"learningRate": 1e-2}, sampling={"temperature": 0.5})
    monkeypatch.setattr(sys, "argv", ["rlhfless", "run", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: tiny has finished all of its 1 steps; its model is in ")
    assert "Since then spec.sampling.temperature was 1.0 and is 0.5, " in said
    assert "spec.optimizer.learningRate was 0.001 and is 0.01. The change had no effect: " in said
    assert "start over with --fresh, use another metadata.name" in said
