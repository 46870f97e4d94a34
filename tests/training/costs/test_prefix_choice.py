"""The choice of `generation.sharePrefixes: auto`, its reasons, and what it is not asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import SampleTask
from rlhfless_functions.data.prefix_tree import prefix_tree
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.planner.history import History
from rlhfless_operator.training.costs.prefix_choice import MEASURED, UNABLE, PrefixChoice
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing, TokenSeconds
from tests.training.requests.test_builder import job
from tests.training.whole_jobs import MakeJob, run_job

BLOCK = 4


def choice(history: History | None = None, actors: int = 2, **generation: Any) -> PrefixChoice:
    spec = job(generation=generation).spec
    return PrefixChoice(spec, ActorRange(1, actors), history or History())


def sharing(prefixes: int, transfer: float = 0.1) -> PrefixSharing:
    """Two actors have prompts with each of so many prefixes of 20 tokens."""
    prompts = [[*range(20 * number, 20 * number + 20), 99] for number in range(prefixes)] * 2
    tree = prefix_tree(prompts, BLOCK)
    assert tree is not None
    shares = [[SampleTask(prompt=actor * prefixes + row, index=0) for row in range(prefixes)] for actor in range(2)]
    seconds = TokenSeconds(prefill=1.0, send=transfer, fetch=transfer)
    return PrefixSharing(tree, shares, [21] * len(prompts), seconds)


def consider(
    made: PrefixChoice,
    step: int,
    found: PrefixSharing | None,
    seconds: float = 100.0,
    left: int = 10,
    restart: float = 5,
) -> str | None:
    return made.consider(step, found, generation_seconds=seconds, steps_left=left, restart=restart)


@pytest.mark.parametrize(
    ("actors", "spec", "reason"),
    [
        (2, {"generation": {"sharePrefixes": "always"}}, "always, by generation.sharePrefixes"),
        (2, {"generation": {"sharePrefixes": "never"}}, "never, by generation.sharePrefixes"),
        (2, {"generation": {"engine": "transformers"}}, "only vLLM shares prefixes"),
        (1, {}, "a step has one actor"),
        (2, {"generation": {"drafting": "auto"}}, "drafts no tokens"),
        (2, {"asynchronous": {}}, "rollouts of an asynchronous job overlap"),
    ],
)
def test_what_settles_it_before_the_job_begins(actors: int, spec: dict[str, Any], reason: str) -> None:
    made = PrefixChoice(job(**spec).spec, ActorRange(1, actors), History())
    assert made.is_settled(1)
    assert reason in made.reason
    assert made.able == ("always" in reason)


def test_actors_share_where_that_is_expected_to_pay() -> None:
    made = choice()
    assert not made.is_settled(1)
    assert consider(made, 1, sharing(prefixes=2)) is None
    assert made.able
    assert made.used(sharing(prefixes=2))
    # 42 tokens of each actor become 22; 20 are sent and 20 fetched.
    assert "can save 32 of 84 instance-seconds" in made.reason
    assert made.is_settled(1)
    assert not made.is_settled(2)


@pytest.mark.parametrize(
    ("found", "seconds", "reason"),
    [
        (None, 100.0, "no two prompts begin"),
        (sharing(prefixes=1), 100.0, "can save -"),
        (sharing(prefixes=2, transfer=0.6), 100.0, "can save -"),
        (sharing(prefixes=2), 10_000.0, "a connector takes 3e+02"),
    ],
    ids=["nothing in common", "one prefix, which all would wait for", "sending is slow", "responses take far longer"],
)
def test_actors_share_nothing_where_that_is_not_expected_to_pay(
    found: PrefixSharing | None, seconds: float, reason: str
) -> None:
    made = choice()
    assert consider(made, 1, found, seconds) is None
    assert not made.able
    assert reason in made.reason


def test_a_step_that_sharing_makes_longer_shares_nothing_and_restarts_nothing() -> None:
    made = choice()
    consider(made, 1, sharing(prefixes=2))
    slow = sharing(prefixes=2, transfer=0.6)
    consider(made, 2, slow, restart=1000.0)
    assert made.able
    assert not made.used(slow)
    assert made.used(sharing(prefixes=2))


def test_what_was_measured_not_to_pay_is_not_done_again() -> None:
    history = History()
    made = choice(history)
    consider(made, 1, sharing(prefixes=2))
    for step, gain, used in ((2, -3.0, True), (3, 1.0, False), (4, 9.0, True)):
        history.add(MEASURED, gain)
        consider(made, step, sharing(prefixes=2), restart=1000.0)
        assert made.used(sharing(prefixes=2)) == used, "the first step alone does not count: its instances are new"
        assert made.able, "that is no reason to start instances again"
        assert made.reason.startswith("yes" if used else "no: it has taken 1 instance-seconds a step more")


def test_instances_start_again_if_the_steps_that_are_left_gain_more() -> None:
    made = choice()
    consider(made, 1, None)
    consider(made, 2, sharing(prefixes=1))
    assert not made.able
    for step, left, able in ((3, 1, False), (4, 100, True)):
        note = consider(made, step, sharing(prefixes=2), left=left, restart=100.0)
        assert made.able == able
        assert (note is not None) == able, "people are told of what starts instances again"


def test_a_later_driver_goes_on_with_the_choice() -> None:
    made = choice()
    consider(made, 1, sharing(prefixes=2))
    later = choice()
    later.restore(made.state())
    assert later.able
    assert consider(later, 2, sharing(prefixes=1), restart=1e6) is None
    assert later.able, "its instances are there"


def test_an_engine_that_shares_nothing_is_asked_once_and_not_started_again() -> None:
    history = History()
    made = choice(history)
    consider(made, 1, sharing(prefixes=2))
    history.add(UNABLE, 1.0)
    assert consider(made, 2, sharing(prefixes=2)) is None
    assert made.able
    assert not made.used(sharing(prefixes=2))
    assert made.reason == "no: the engine of this job's instances shares none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefixes", "reasons"),
    [
        (8, ["yes: step 1 can save ", "no: the engine of this job's instances shares none"]),
        (1, ["no: step 1 can save -", "no: step 2 can save -"]),
    ],
    ids=["it would pay, but transformers can't", "it would not pay"],
)
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
def test_the_plan_of_each_step_says_why_a_jobs_actors_share_or_do_not(
    tiny_job: MakeJob, tmp_path: Path, prefixes: int, reasons: list[str]
) -> None:
    job = tiny_job(
        generation={"instances": {"min": 2, "max": 2}, "keepAlive": "10m"},
        sampling={"maxPromptTokens": 480, "maxResponseTokens": 4},
        data={"shuffle": False},
        batch={"promptsPerStep": 16, "samplesPerPrompt": 2},
        steps=2,
    )
    beginnings = [110 * f"{number}+2=" for number in range(prefixes)]
    prompts = [{"prompt": f"{beginnings[row % prefixes]}{row}=", "ground_truth": row} for row in range(16)]
    (job.parent / "train.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    run_job(job)
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    for line, begin in zip(lines, reasons, strict=True):
        assert json.loads(line)["plan"]["prefixes"].startswith(begin)
