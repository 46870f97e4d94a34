"""Rehearsals: the whole loop with real processes and streams, on GPUs that are emulated."""

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator.job.reading.validation import InvalidJobError, load_job
from rlhfless_operator.planner.latency.roofline import GPUS, QWEN_3B
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.planner.step import generation as planning
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.whole_step import StepPlan
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.simulator.traces import LengthStatistics, Trace, generate, write_trace
from rlhfless_operator.training.actors.live_rollout import LiveRollout
from rlhfless_operator.training.costs.measured_drafts import measured_drafts
from rlhfless_operator.training.driver import JobChangedError
from rlhfless_operator.training.journal.async_journal import read_taken
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.rehearsal import emulation_of
from rlhfless_operator.training.requests.tasks import StageFailedError
from rlhfless_operator.training.stages.live_actors import LiveActors
from tests.jobs import document
from tests.training.whole_jobs import MakeJob, run_job

EPOCHS, PROMPTS, SAMPLES = 2, 16, 4

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


@pytest.fixture
def trace() -> Trace:
    lengths = LengthStatistics(median=60, longest=300, prompt_median=40, runaways=0.03)
    return generate(lengths, epochs=EPOCHS, prompts=PROMPTS, samples=SAMPLES, seed=0)


@pytest.fixture
def rehearsal_job(tmp_path: Path, trace: Trace) -> MakeJob:
    """Makes a job file of two epochs on eight emulated GPUs, a hundred times as fast. Overrides go into `rehearsal`."""

    def make(spec: dict[str, Any] | None = None, **overrides: Any) -> Path:
        write_trace(tmp_path / "trace.parquet", trace)
        (tmp_path / "train.jsonl").write_text('{"prompt": "not read"}\n')
        parts: dict[str, Any] = {
            "model": {"source": "Qwen/Qwen2.5-3B"},
            "data": {"source": "train.jsonl"},
            "sampling": {"maxPromptTokens": 1024, "maxResponseTokens": 300},
            "batch": {"promptsPerStep": PROMPTS // 2, "samplesPerPrompt": SAMPLES},
            "steps": 2 * EPOCHS,
            "generation": {"instances": {"min": 8, "max": 8}},
            "planning": {"policy": "even"},
            "artifacts": {"uri": str(tmp_path / "runs")},
            "rehearsal": {"trace": "trace.parquet", "gpu": "L40S", "startup": "5s", "timeScale": 0.01, **overrides},
            **(spec or {}),
        }
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(document("rehearsal", **parts)))
        return file

    return make


@pytest.mark.slow
def test_a_rehearsal_goes_through_all_steps_with_the_lengths_of_its_trace(
    rehearsal_job: MakeJob, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[StepBatch] = []
    commit = StepJournal.commit

    async def observe(journal: StepJournal, step: int, batch: StepBatch, *rest: Any) -> StepRecord:
        batches.append(batch)
        return await commit(journal, step, batch, *rest)

    monkeypatch.setattr(StepJournal, "commit", observe)
    summary = run_job(rehearsal_job())
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 2 * EPOCHS)
    visits = dict.fromkeys(range(PROMPTS), 0)
    for batch in batches:
        assert batch.plan.actors == 8
        for prompt, lengths in batch.lengths.items():
            assert lengths == trace.response_tokens[visits[prompt], prompt].tolist()
            visits[prompt] += 1
    assert set(visits.values()) == {EPOCHS}
    folder = tmp_path / "runs" / "rehearsal"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        assert record["ledger"]["generation"]["busy"] > 0
        assert record["ledger"]["learning"]["busy"] > 0
    assert "<html" in (folder / "report.html").read_text()
    assert not (folder / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "asynchronous",
    [
        {"maxStaleness": 1},
        {"maxStaleness": 2},
        {"maxStaleness": 2, "newWeights": "switch"},
        {"maxStaleness": 2, "newWeights": "switch", "kvCache": "keep"},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_an_asynchronous_rehearsal_learns_from_what_its_trace_has(
    rehearsal_job: MakeJob,
    trace: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: dict[str, Any],
) -> None:
    max_staleness = asynchronous["maxStaleness"]
    rollouts: dict[int, StepBatch] = {}
    keep_rollout = StepJournal.keep_rollout

    def observe(journal: StepJournal, number: int, rollout: StepBatch) -> None:
        rollouts[number] = rollout
        keep_rollout(journal, number, rollout)

    monkeypatch.setattr(StepJournal, "keep_rollout", observe)
    summary = run_job(rehearsal_job(spec={"async": asynchronous}))
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 2 * EPOCHS)
    folder = tmp_path / "runs" / "rehearsal"
    visits = dict.fromkeys(range(PROMPTS), 0)
    groups: list[tuple[int | None, int]] = []
    for step in range(1, 2 * EPOCHS + 1):
        taken = read_taken(JobFolder(str(folder)), step)
        assert taken is not None
        assert {group.version for group in taken.groups} <= set(range(max(0, step - 1 - max_staleness), step))
        groups += [(group.rollout, group.prompt) for group in taken.groups]
    assert sorted(groups) == sorted((number, prompt) for number in rollouts for prompt in rollouts[number].lengths)
    for _, rollout in sorted(rollouts.items()):
        for prompt, lengths in rollout.lengths.items():
            assert lengths == trace.response_tokens[visits[prompt], prompt].tolist()
            visits[prompt] += 1
    assert set(visits.values()) == {EPOCHS}, "no group is lost, and none is learnt from twice"
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["ledger"]["learning"]["busy"] > 0
        assert "generation/switched_responses" not in record["metrics"], "which version sampled a token is not known"


@pytest.mark.slow
def test_actors_of_an_asynchronous_job_follow_the_rates_of_generation_and_learning(
    rehearsal_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learner that turns out to be slow, later rollouts have fewer actors."""
    asked: list[Batches] = []
    generating = LiveActors.generating

    def observe(live: LiveActors, rollout: LiveRollout, batches: Batches) -> AbstractAsyncContextManager[None]:
        asked.append(batches)
        return generating(live, rollout, batches)

    monkeypatch.setattr(LiveActors, "generating", observe)
    spec = {
        "async": {"maxStaleness": 1},
        "generation": {"instances": {"min": 1, "max": 8}},
        # Time counts for nearly everything, and actors that bring nothing are not worth their price.
        "planning": {"policy": "cost", "lambda": 0.02},
    }
    assert run_job(rehearsal_job(spec=spec, update="300s"))["phase"] == "Succeeded"
    counts = [each.actors for each in asked]
    assert counts[0] > 1, "nothing is known of the learner"
    assert counts[-1] == 1, "one actor is fast enough beside the learner"
    assert all(each.places >= each.samples for each in asked)


def test_the_plan_knows_the_batch_of_the_engine_as_soon_as_it_has_said_so(
    rehearsal_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Limits] = []
    plan_step = planning.plan_step

    def observe(samples: Any, profile: Any, asked: Limits, *rest: Any, **options: Any) -> StepPlan:
        limits.append(asked)
        return plan_step(samples, profile, asked, *rest, **options)

    monkeypatch.setattr(planning, "plan_step", observe)
    spec = {"planning": {"policy": "cost"}, "generation": {"instances": {"min": 1, "max": 2}}}
    run_job(rehearsal_job(spec=spec, maxBatch=5))
    assert limits[0].max_batch is None, "nobody has started yet"
    assert [each.max_batch for each in limits[1:]] == [5] * (len(limits) - 1)
    kept = json.loads((tmp_path / "runs" / "rehearsal" / "progress" / "step-000004.json").read_text())
    assert '"sequences": 5' in json.dumps(kept)


def test_a_job_that_was_rehearsed_is_not_gone_on_with_as_a_real_one(rehearsal_job: MakeJob) -> None:
    run_job(rehearsal_job(spec={"steps": 1}))
    with pytest.raises(JobChangedError, match=r"spec\.rehearsal changed"):
        run_job(rehearsal_job(spec={"steps": 2}, gpu="H100"))


def test_what_is_emulated_is_what_the_job_names(rehearsal_job: MakeJob) -> None:
    job = load_job(rehearsal_job(gpu="H100", gpus=2, model="Qwen2.5-7B", weightLoad="1.5s")).spec
    emulation = emulation_of(load_job(rehearsal_job(gpu="L40S")))
    other = emulation_of(load_job(rehearsal_job(gpu="H100", gpus=2, model="Qwen2.5-7B", weightLoad="1.5s")))
    assert emulation is not None and other is not None and job.rehearsal is not None
    assert emulation.step_seconds == pytest.approx(0.0095, rel=0.1)
    # GRPO as written here has no reference policy and takes one update a step: nothing is asked of models.
    assert emulation.preparation_token_seconds == 0
    assert emulation.learning_token_seconds == pytest.approx(6 * QWEN_3B.parameters / (GPUS["L40S"].flops * 0.35))
    assert emulation.preparation_load_seconds == 0
    assert emulation.learning_move_seconds == pytest.approx(12 * QWEN_3B.parameters / (0.8 * 32e9))
    assert other.step_seconds < emulation.step_seconds
    assert (other.weight_load_seconds, other.startup_seconds) == (1.5, 5.0)


def test_a_learner_has_the_gpus_that_learning_names(rehearsal_job: MakeJob) -> None:
    one, four = (emulation_of(load_job(rehearsal_job(spec={"learning": {"processes": count}}))) for count in (1, 4))
    assert one is not None and four is not None
    assert one.learning_token_seconds == pytest.approx(4 * four.learning_token_seconds)
    assert one.learning_move_seconds == pytest.approx(4 * four.learning_move_seconds)
    assert one.step_seconds == four.step_seconds


def test_preparation_reads_each_model_that_it_asks(rehearsal_job: MakeJob) -> None:
    algorithm = {"name": "grpo", "kl": {"coefficient": 0.01}}
    emulation = emulation_of(load_job(rehearsal_job(spec={"algorithm": algorithm}, weightLoad="1.5s")))
    assert emulation is not None
    assert emulation.preparation_load_seconds == 1.5


def test_a_job_without_the_field_emulates_nothing(tiny_job: MakeJob) -> None:
    assert emulation_of(load_job(tiny_job())) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "Llama-2-70B"}, r"gpus is 1: Llama-2-70B needs 138 GB .* use at least 4"),
        ({"model": "nobody/model"}, r"rehearsal\.model is 'nobody/model', which is no folder here"),
    ],
)
def test_gpus_that_cannot_be_emulated_are_named_before_anything_starts(
    rehearsal_job: MakeJob, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_job(rehearsal_job(**changes))
    assert not (tmp_path / "runs").exists()


def test_an_unknown_gpu_is_named_with_those_there_are(rehearsal_job: MakeJob) -> None:
    with pytest.raises(InvalidJobError, match=r"spec\.rehearsal\.gpu.*L40S"):
        load_job(rehearsal_job(gpu="B300"))


def test_a_trace_whose_prompts_are_too_long_is_refused(rehearsal_job: MakeJob) -> None:
    sampling = {"maxPromptTokens": 5, "maxResponseTokens": 300}
    with pytest.raises(StageFailedError, match=r"more than sampling\.maxPromptTokens \(5\); raise it to"):
        run_job(rehearsal_job(spec={"sampling": sampling}))


def test_a_rehearsal_drafts_and_plans_by_it(rehearsal_job: MakeJob, tmp_path: Path) -> None:
    """From the second step on, at the acceptance that is given. The run's metrics say so, and another goes by them."""
    spec = {
        "planning": {"policy": "cost"},
        "generation": {"instances": {"min": 1, "max": 2}, "drafting": "auto"},
    }
    run_job(rehearsal_job(spec=spec, draftAcceptance=0.8, draftCoverage=0.9, timeScale=0.05))
    folder = tmp_path / "runs" / "rehearsal"
    metrics = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    passes = [each["generation/tokens_per_pass"] for each in metrics]
    assert passes[0] == 1.0 and all(each > 1.5 for each in passes[1:])
    assert "generation/drafts/acceptance" not in metrics[0]
    assert metrics[-1]["generation/drafts/acceptance"] == pytest.approx(0.8, abs=0.05)
    assert metrics[-1]["generation/drafts/coverage"] == pytest.approx(0.9, abs=0.01)
    assert all(0 < each["planning/lower_bound_share"] <= 1 for each in metrics if "planning/lower_bound_share" in each)
    kept = json.loads((folder / "progress" / "step-000004.json").read_text())
    assert "drafts/acceptance" in json.dumps(kept), "a job that goes on plans as well"
    drafts = measured_drafts(str(folder))
    assert drafts is not None
    assert (drafts.coverage, drafts.acceptance) == pytest.approx((0.9, 0.8), abs=0.05)
    # The same run as the trace of another: nothing needs to be given.
    emulation = emulation_of(load_job(rehearsal_job(trace=str(folder))))
    assert emulation is not None
    assert emulation.draft_acceptance == pytest.approx(drafts.acceptance)
