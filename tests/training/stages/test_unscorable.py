"""Jobs whose rewards score too few samples fail, and say what to do."""

from pathlib import Path

import pytest

from rlhfless_functions.settings import ExactMatchReward, PythonReward, RewardSettings
from rlhfless_operator.training.stages.unscorable import UnscorableError, check_unscorable
from tests.training.asynchronous.test_loop import AHEAD, check_journal, check_prompts, replayed
from tests.training.whole_jobs import MakeJob, folder_of, records_of, run_job, status_of

REWARDS = [
    RewardSettings(name="math", exact_match=ExactMatchReward()),
    RewardSettings(name="judge", python=PythonReward(file="judge.py")),
]
SUMS = {
    "reward/count": 4.0,
    "reward/unscorable/count": 12.0,
    "reward/math/unscorable/count": 16.0,
    "reward/judge/unscorable/count": 12.0,
    "reward/judge/errors/count": 3.0,
}
TASKS = """
def reward(completions, ground_truth):
    return [float(c.count("1")) if str(t) == "{task}" else None for c, t in zip(completions, ground_truth)]
"""


def test_the_message_names_share_limit_rewards_and_remedies() -> None:
    with pytest.raises(UnscorableError) as raised:
        check_unscorable(SUMS, REWARDS, 0.5, "step 3")
    assert str(raised.value) == (
        "step 3: no reward scored 12 of 16 samples, a share of 0.75, which is more than limits.unscorable, 0.5 ('math'"
        " left 16 unscored, 'judge' left 12 unscored, having failed for 3 groups); mend the rewards or the data,"
        " add a reward that scores what these leave out, or raise limits.unscorable"
    )


def test_a_share_at_the_limit_is_within_it() -> None:
    check_unscorable(SUMS, REWARDS, 0.75, "step 3")
    check_unscorable({}, REWARDS, 0.0, "step 3")
    check_unscorable({"reward/unscorable/count": 1.0}, REWARDS, 1.0, "step 3")


def multi_task(file: Path, *tasks: str) -> list[dict[str, object]]:
    """Rewards in TRL's form for several tasks: each scores the samples of its own and says None of the others."""
    for task in tasks:
        (file / f"task_{task}.py").write_text(TASKS.format(task=task))
    return [{"name": f"task-{task}", "python": {"file": f"task_{task}.py"}} for task in tasks]


pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def test_rewards_that_each_score_their_own_task_train_on_every_sample(tiny_job: MakeJob) -> None:
    folder = tiny_job().parent
    file = tiny_job(steps=1, rewards=multi_task(folder, "0", "1", "2", "3"))
    run_job(file)
    (record,) = records_of(file)
    assert record["metrics"]["reward/unscorable"] == 0
    assert record["metrics"]["batch/masked_samples"] == 0
    assert sum(record["metrics"][f"reward/task-{task}/unscorable"] for task in range(4)) == 3 * 16


def test_a_job_whose_rewards_score_nothing_fails_and_goes_on_once_they_are_mended(tiny_job: MakeJob) -> None:
    folder = tiny_job().parent
    rewards = multi_task(folder, "poetry")
    file = tiny_job(steps=1, rewards=rewards)
    with pytest.raises(UnscorableError, match=r"step 1: no reward scored 16 of 16 samples.*'task-poetry' left 16"):
        run_job(file)
    assert status_of(file)["phase"] == "Failed"
    assert "limits.unscorable" in status_of(file)["message"]
    assert not (folder_of(file) / "weights").exists()
    assert not (folder_of(file) / "model").exists()

    (folder / "task_poetry.py").write_text("def reward(completions): return [float(c.count('1')) for c in completions]")
    run_job(file)
    (record,) = records_of(file)
    assert record["metrics"]["reward/unscorable"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "failures"), [(1, 2), (3, 1)])
def test_an_asynchronous_job_fails_too_and_goes_on_though_a_step_has_learnt_from_some_groups(
    tiny_job: MakeJob, steps: int, failures: int
) -> None:
    """How many samples of a rollout have a reward is known once all of its groups are there to be learnt from."""
    folder = tiny_job().parent
    file = tiny_job(**AHEAD, steps=steps, rewards=multi_task(folder, "poetry"))
    for _ in range(failures):
        with pytest.raises(UnscorableError, match=r"step \d: no reward scored 16 of 16 samples.*'task-poetry' left 16"):
            run_job(file)
        assert status_of(file)["phase"] == "Failed"
        assert "limits.unscorable" in status_of(file)["message"]

    (folder / "task_poetry.py").write_text("def reward(completions): return [float(c.count('1')) for c in completions]")
    assert run_job(file)["phase"] == "Succeeded"
    check_journal(file, steps, 1)
    check_prompts(file)
    assert "the same weights bit for bit" in replayed(file)


def test_the_limit_is_the_users(tiny_job: MakeJob) -> None:
    folder = tiny_job().parent
    file = tiny_job(steps=1, rewards=multi_task(folder, "poetry"), limits={"unscorable": 1.0})
    run_job(file)
    assert records_of(file)[0]["metrics"]["reward/unscorable"] == 16


def test_groups_that_dynamic_sampling_replaced_count_too(tiny_job: MakeJob) -> None:
    folder = tiny_job().parent
    file = tiny_job(
        steps=1,
        rewards=multi_task(folder, "poetry"),
        algorithm={"name": "dapo", "dynamicSamplingRounds": 1},
        batch={"promptsPerStep": 8},
    )
    with pytest.raises(UnscorableError, match="step 1: no reward scored 48 of 48 samples"):
        run_job(file)


def test_an_evaluation_that_can_not_be_scored_fails_before_anything_is_trained(tiny_job: MakeJob) -> None:
    folder = tiny_job().parent
    file = tiny_job(
        steps=1,
        rewards=multi_task(folder, "0", "1", "2", "3"),
        evaluation={"data": {"source": "held_out.jsonl"}, "samplesPerPrompt": 2},
    )
    (folder / "held_out.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' + '{"prompt": "7+1="}\n' * 2)
    with pytest.raises(UnscorableError, match="evaluation after step 0: no reward scored 4 of 6 samples"):
        run_job(file)
    assert not (folder_of(file) / "weights").exists()
