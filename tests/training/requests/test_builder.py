"""The requests of a job."""

from typing import Any

import pytest

from rlhfless_functions.api import (
    BatchReference,
    LearnRequest,
    LearnResult,
    Prompting,
    SampleTask,
    WeightsReference,
)
from rlhfless_functions.learning.outputs import result_of, version_of
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.settings_history import SettingsHistory
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.instances.draft_history import DraftHistory
from rlhfless_operator.training.requests.builder import RequestBuilder
from tests import jobs


def job(**spec: Any) -> RLHFJob:
    return jobs.job(**{"model": {"source": "m"}, **spec})


def test_engines_are_told_that_they_sleep_between_their_tasks() -> None:
    made = job()
    assert RequestBuilder(made, JobFolder("runs/job"), "uid", sleeps=True).engine.sleeps
    assert not RequestBuilder(made, JobFolder("runs/job"), "uid").engine.sleeps


def attempt_of(samples: list[SampleTask], version: int = 0) -> ActorAttempt:
    return ActorAttempt("actor-0000", 0, WeightsReference(version=version, uri="m"), samples, "sink", [], {})


def test_drafts_are_made_from_the_newest_visits_of_the_shares_prompts_unless_the_job_says_never() -> None:
    samples = [SampleTask(prompt=3, index=0)]
    history = DraftHistory()
    history.generated(1, {3: [5]})
    history.generated(2, {4: [5]})
    history.generated(3, {5: [5]})
    for generation, wanted in (
        ({"drafting": "auto"}, ["runs/job/drafts/step-000001", "runs/job/drafts/step-000003"]),
        ({}, None),
    ):
        requests = RequestBuilder(job(generation=generation), JobFolder("runs/job"), "uid")
        made = requests.generate(4, "training", None, None, history.steps_for, attempt_of(samples))
        assert made.drafts == wanted
        prepared = requests.prepare(4, "training", requests.initial, None, "chunk", 0, samples, ["part"], {3: 1})
        assert prepared.drafts == (None if wanted is None else "runs/job/drafts/step-000004/chunk.parquet")


def test_an_evaluation_drafts_from_the_newest_step_alone_and_leaves_nothing() -> None:
    samples = [SampleTask(prompt=3, index=0)]
    history = DraftHistory()
    history.generated(1, {3: [5]})
    history.generated(2, {4: [5]})
    evaluated = job(evaluation={"data": {"source": "heldout.jsonl"}}, generation={"drafting": "auto"})
    requests = RequestBuilder(evaluated, JobFolder("runs/job"), "uid")
    made = requests.generate(2, "evaluation", None, None, history.steps_for, attempt_of(samples))
    assert made.drafts == ["runs/job/drafts/step-000002"]
    assert requests.prepare(2, "evaluation", requests.initial, None, "c", 0, samples, ["part"], {}).drafts is None


def test_only_requests_that_keep_tokens_of_older_weights_keep_their_keys_and_values() -> None:
    for kv_cache, oldest, wanted in (("keep", 0, True), ("keep", None, False), ("recompute", 0, False)):
        made = RequestBuilder(
            job(**{"async": {"newWeights": "switch", "kvCache": kv_cache}}), JobFolder("runs/job"), "uid"
        )
        attempt = attempt_of([SampleTask(prompt=3, index=0)], 1)
        request = made.generate(2, "training", oldest, None, DraftHistory().steps_for, attempt)
        assert request.keep_kv_cache == wanted


@pytest.mark.parametrize("relays", ["auto", "never"])
def test_a_request_names_the_versions_that_may_come_while_it_decodes(relays: str) -> None:
    requests = RequestBuilder(job(generation={"weightRelays": relays}), JobFolder("runs/job"), "uid")
    first = WeightsReference(version=1, uri="runs/job/weights/step-000001")
    named = requests.next_weights(first, 2, lambda version: [f"http://{version}"])
    assert [each.weights for each in named] == [
        WeightsReference(version=version, uri=f"runs/job/weights/step-00000{version}") for version in (2, 3)
    ]
    assert [each.weights_from for each in named] == ([["http://2"], ["http://3"]] if relays == "auto" else [None, None])
    lines = [f"runs/job/lines/step-00000{version}" if relays == "auto" else None for version in (1, 2, 3)]
    assert [each.weights_line for each in named] == lines[1:]
    assert requests.preload(first).weights_line == lines[0]
    assert requests.next_weights(first, 0, lambda version: []) == []
    attempt = attempt_of([SampleTask(prompt=3, index=0)], 1)
    made = requests.generate(4, "training", 0, None, DraftHistory().steps_for, attempt)
    assert made.weights_line == lines[0]


def test_versions_to_come_of_an_adapter_are_on_the_models_own_weights() -> None:
    requests = RequestBuilder(job(model={"source": "m", "lora": {"rank": 4}}), JobFolder("runs/job"), "uid")
    (named,) = requests.next_weights(requests.initial, 1, lambda version: [])
    assert named.weights == WeightsReference(version=1, uri="m", adapter="runs/job/weights/step-000001")


@pytest.mark.parametrize("deltas", ["auto", "never"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_step_starts_from_one_that_is_not_written_down_and_names_what_is_to_be_published_of_it(
    deltas: str, lora: dict[str, int] | None
) -> None:
    """As the learner names it that publishes it: `learning.publishing.version_of`."""
    model = {"source": "m", **({"lora": lora} if lora else {})}
    of_job = job(model=model, learning={"weightDeltas": deltas}, algorithm={"name": "ppo"})
    requests = RequestBuilder(of_job, JobFolder("runs/job"), "uid")

    def learn(status: RLHFJobStatus, step: int, before: LearnResult | None) -> LearnRequest:
        batch = BatchReference(step=step, parts=["part"], samples=[SampleTask(prompt=0, index=0)])
        return requests.learn(
            *(status, batch, [], SettingsHistory(), 9),
            checkpoint_due=False,
            attempt=0,
            before=before,
            publish_beside=True,
        )

    status = RLHFJobStatus(uid="uid", step=3, weights=result_of(learn(RLHFJobStatus(uid="uid"), 3, None), {}).weights)
    fourth = learn(status, 4, None)
    assert fourth.unpublished is None
    fifth = learn(status, 5, result_of(fourth, {}))
    assert (fifth.base.version, fifth.base.adapter or fifth.base.uri) == (4, "runs/job/weights/step-000004")
    assert fifth.unpublished == version_of(fourth)
    assert fifth.unpublished is not None
    assert (fifth.unpublished.since is not None) == (deltas == "auto" and lora is None)


@pytest.mark.parametrize(("stall", "heartbeat"), [("120s", 5.0), ("15s", 5.0), ("6s", 2.0), ("300ms", 0.1)])
def test_every_request_asks_for_heartbeats_well_within_the_longest_silence(stall: str, heartbeat: float) -> None:
    requests = RequestBuilder(job(limits={"stall": stall}), JobFolder("runs/job"), "uid")
    samples = [SampleTask(prompt=0, index=0)]
    batch = BatchReference(step=1, parts=["part"], samples=samples)
    initial = requests.initial
    made = [
        requests.materialize("training", 0),
        requests.generate(1, "training", None, None, DraftHistory().steps_for, attempt_of(samples)),
        requests.prepare(1, "training", initial, None, "chunk", 0, samples, ["part"], {0: 2}),
        requests.learn(RLHFJobStatus(uid="uid"), batch, [], SettingsHistory(), 1, checkpoint_due=True, attempt=0),
        requests.export(initial, "card", Prompting(), "runs/job/model", 0),
    ]
    assert [request.heartbeat_seconds for request in made] == pytest.approx([heartbeat] * 5)


IN_REWARD = {"name": "rloo", "kl": {"coefficient": 0.1, "placement": "reward"}}


@pytest.mark.parametrize(
    ("algorithm", "minibatch", "steps"),
    [
        ({"name": "grpo"}, 4, []),
        ({"name": "grpo"}, 2, []),
        (IN_REWARD, 4, [1, 2, 3]),
        (IN_REWARD, 2, [1, 2, 3]),
        ({"name": "ppo"}, 2, []),
        ({"name": "ppo", "critic": {"warmupSteps": 2}}, 4, [1, 2]),
    ],
)
def test_preparation_asks_the_policy_where_learning_does_not_or_the_reward_needs_it(
    algorithm: dict[str, object], minibatch: int, steps: list[int]
) -> None:
    """Old log-probabilities are the learner's own, but with a policy that is frozen a step would tell no mismatch; and
    a distance in the reward is known before learning."""
    batch = {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": minibatch}
    requests = RequestBuilder(job(algorithm=algorithm, batch=batch), JobFolder("runs/job"), "uid")
    samples = [SampleTask(prompt=0, index=0)]
    asked = [
        step
        for step in (1, 2, 3)
        if requests.prepare(
            step, "training", requests.initial, None, "chunk", 0, samples, ["part"], {0: 1}
        ).old_log_probs
    ]
    assert asked == steps


@pytest.mark.parametrize(
    ("algorithm", "minibatch", "preparing", "learning"),
    [
        ({"name": "grpo"}, 4, 0, 1),
        ({"name": "grpo"}, 1, 0, 1 + 3 / 4 / 3),
        ({"name": "grpo", "epochs": 2}, 4, 0, 2 + 1 / 3),
        ({"name": "ppo", "kl": {"coefficient": 0.1}, "epochs": 2}, 2, 2, 4 + 1 / 3),
        (IN_REWARD, 4, 2, 1),
    ],
)
def test_passes_of_a_step_are_counted(
    algorithm: dict[str, object], minibatch: int, preparing: int, learning: float
) -> None:
    batch = {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": minibatch}
    requests = RequestBuilder(job(algorithm=algorithm, batch=batch), JobFolder("runs/job"), "uid")
    assert requests.passes.preparation == preparing
    assert requests.passes.learning == pytest.approx(learning)
    ahead = RequestBuilder(job(algorithm=algorithm, batch=batch, **{"async": {}}), JobFolder("runs/job"), "uid")
    moved = algorithm["name"] == "ppo"
    assert ahead.passes.preparation == preparing - moved
    assert ahead.passes.learning == pytest.approx(learning + moved / 3)


@pytest.mark.parametrize(
    ("algorithm", "ahead", "by"),
    [
        ("ppo", False, "preparation's critic"),
        ("ppo", True, "the learner"),
        ("grpo", False, "no critic"),
        ("grpo", True, "no critic"),
    ],
)
def test_advantages_of_an_asynchronous_job_s_critic_are_the_learner_s(algorithm: str, ahead: bool, by: str) -> None:
    made = job(algorithm={"name": algorithm}, **({"async": {}} if ahead else {}))
    requests = RequestBuilder(made, JobFolder("runs/job"), "uid")
    critic = WeightsReference(version=3, uri="runs/job/critics/step-3") if algorithm == "ppo" else None
    samples = [SampleTask(prompt=0, index=0)]
    request = requests.prepare(4, "training", requests.initial, critic, "chunk", 0, samples, ["part"], {0: 1})
    assert request.advantages == (by != "the learner")
    assert request.critic == (critic if by == "preparation's critic" else None)


def test_each_dataset_is_read_for_the_rewards_that_score_it() -> None:
    own = [{"name": "held_out", "exactMatch": {}}]
    evaluated = job(evaluation={"data": {"source": "heldout.jsonl"}, "rewards": own})
    requests = RequestBuilder(evaluated, JobFolder("runs/job"), "uid")
    assert [reward.name for reward in requests.materialize("evaluation", 0).rewards] == ["held_out"]
    assert requests.materialize("training", 0).rewards == evaluated.spec.rewards
