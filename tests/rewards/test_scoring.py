"""The rewards of a job together: weights, unscorable responses, errors, metrics."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer, Scores, weighted_sum
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import (
    ExactMatchReward,
    FormatReward,
    LengthReward,
    MathReward,
    PythonReward,
    RewardSettings,
    SamplingSettings,
)


@pytest.fixture
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer()
    yield scorer
    scorer.close()


def make_group(prompt: int, *completions: str) -> RewardGroup:
    size = len(completions)
    ids = [[1] * len(completion) for completion in completions]
    return RewardGroup(prompt, "q", None, list(completions), ids, ["stop"] * size, {"ground_truth": "4"})


def python_reward(tmp_path: Path, body: str, **settings: object) -> RewardSettings:
    path = tmp_path / "mine.py"
    path.write_text(f"def reward(prompts, completions):\n    {body}\n")
    return RewardSettings(name="mine", python=PythonReward(file=str(path)), **settings)


def score(scorer: RewardScorer, rewards: list[RewardSettings], *groups: RewardGroup) -> Scores:
    return scorer.score(rewards, groups, SamplingSettings(max_response_tokens=10))


def test_terms_are_weighted_and_summed(scorer: RewardScorer) -> None:
    rewards = [
        RewardSettings(name="right", exact_match=ExactMatchReward(), weight=2.0),
        RewardSettings(name="digits", format=FormatReward(pattern=r"\d+")),
        RewardSettings(name="short", length=LengthReward(buffer_tokens=4), weight=0.5),
    ]
    scores = score(scorer, rewards, make_group(0, "4", "5", "four"), make_group(1, "12345678"))
    assert scores.terms == {
        "right": [[1, 0, 0], [0]],
        "digits": [[1, 1, 0], [1]],
        "short": [[0, 0, 0], [-0.5]],
    }
    assert scores.totals == [[3.0, 1.0, 0.0], [0.75]]


def test_the_terms_that_scored_a_response_are_summed(scorer: RewardScorer, tmp_path: Path) -> None:
    right = RewardSettings(name="right", exact_match=ExactMatchReward())
    mine = python_reward(tmp_path, "return [None if c == '5' else 1.0 for c in completions]")
    scores = score(scorer, [right, mine], make_group(0, "4", "5"))
    assert scores.totals == [[2.0, 0.0]]
    assert scores.metrics["reward/unscorable/count"] == 0
    assert scores.metrics["reward/mine/unscorable/count"] == 1
    assert scores.metrics["reward/right/unscorable/count"] == 0


def test_a_response_is_unscorable_where_no_term_that_counts_scored_it(scorer: RewardScorer, tmp_path: Path) -> None:
    right = RewardSettings(name="right", exact_match=ExactMatchReward(), weight=0.0)
    mine = python_reward(tmp_path, "return [None if c == '5' else 1.0 for c in completions]")
    scores = score(scorer, [right, mine], make_group(0, "4", "5"))
    assert scores.totals == [[1.0, None]]
    assert scores.metrics["reward/unscorable/count"] == 1
    assert scores.terms["right"] == [[1.0, 0.0]]


def test_each_reward_may_score_its_own_task_as_in_trl(scorer: RewardScorer, tmp_path: Path) -> None:
    rewards = []
    for task in ("math", "code"):
        (tmp_path / f"{task}.py").write_text(
            f"def reward(completions, task):\n    return [1.0 if t == {task!r} else None for t in task]\n"
        )
        rewards.append(RewardSettings(name=task, python=PythonReward(file=str(tmp_path / f"{task}.py")), weight=2.0))
    groups = [
        RewardGroup(row, "q", None, ["4"], [[1]], ["stop"], {"task": task})
        for row, task in enumerate(["math", "code", "poetry"])
    ]
    scores = score(scorer, rewards, *groups)
    assert scores.totals == [[2.0], [2.0], [None]]
    assert scores.metrics["reward/unscorable/count"] == 1


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.none() | st.floats(-1e6, 1e6), st.floats(-10, 10))))
def test_a_weighted_sum_has_no_hidden_terms(terms: dict[str, tuple[float | None, float]]) -> None:
    total = weighted_sum({name: value for name, (value, _) in terms.items()}, {n: w for n, (_, w) in terms.items()})
    counted = [(value, weight) for value, weight in terms.values() if weight != 0]
    if not terms or (counted and all(value is None for value, _ in counted)):
        assert total is None
    else:
        assert total == pytest.approx(sum(value * weight for value, weight in counted if value is not None))


def test_a_term_that_failed_leaves_its_group_out_even_if_others_scored_it(scorer: RewardScorer, tmp_path: Path) -> None:
    right = RewardSettings(name="right", exact_match=ExactMatchReward())
    mine = python_reward(tmp_path, FAILS, on_error="unscorable")
    assert score(scorer, [right, mine], make_group(0, "4"), make_group(1, "5", "4")).totals == [[2.0], [None, None]]
    shown_only = mine.model_copy(update={"weight": 0.0})
    assert score(scorer, [right, shown_only], make_group(1, "5", "4")).totals == [[0.0, 1.0]]


def test_metrics_are_sums_and_counts(scorer: RewardScorer) -> None:
    rewards = [RewardSettings(name="right", exact_match=ExactMatchReward(), weight=2.0)]
    assert score(scorer, rewards, make_group(0, "4", "5"), make_group(1, "4")).metrics == {
        "reward/sum": 4.0,
        "reward/count": 3.0,
        "reward/square/sum": 8.0,
        "reward/unscorable/count": 0,
        "reward/right/sum": 2.0,
        "reward/right/count": 3.0,
        "reward/right/unscorable/count": 0,
        "reward/right/errors/count": 0,
    }


FAILS = "return [1.0 / (c != '5') for c in completions]"


def test_an_error_ends_the_task_with_the_rewards_name_and_the_remedy(scorer: RewardScorer, tmp_path: Path) -> None:
    with pytest.raises(TaskError) as raised:
        score(scorer, [python_reward(tmp_path, FAILS)], make_group(0, "4"), make_group(1, "5", "4"))
    assert raised.value.reason == "reward_failed"
    assert not raised.value.retryable
    assert str(raised.value) == (
        "reward 'mine' raised ZeroDivisionError: float division by zero (mine.py, line 2) (row 1 of the prompts);"
        " correct it, or set its onError to unscorable to exclude such responses"
    )


def test_an_error_may_leave_its_group_out_instead_and_is_counted(scorer: RewardScorer, tmp_path: Path) -> None:
    mine = python_reward(tmp_path, FAILS, on_error="unscorable")
    scores = score(scorer, [mine], make_group(0, "4"), make_group(1, "5", "4"), make_group(2, "4"))
    assert scores.totals == [[1.0], [None, None], [1.0]]
    assert scores.metrics["reward/mine/errors/count"] == 1
    assert scores.metrics["reward/mine/unscorable/count"] == 2
    assert scores.metrics["reward/count"] == 2


def test_what_is_scored_does_not_depend_on_how_groups_are_chunked(scorer: RewardScorer, tmp_path: Path) -> None:
    mine = python_reward(tmp_path, FAILS, on_error="unscorable")
    groups = [make_group(0, "4"), make_group(1, "5", "4"), make_group(2, "3", "2")]
    apart = [total for group in groups for total in score(scorer, [mine], group).totals]
    assert score(scorer, [mine], *groups).totals == apart


def test_one_failure_stops_the_other_rewards(scorer: RewardScorer, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef reward(completions): time.sleep(1000)")
    slow = RewardSettings(name="slow", python=PythonReward(file=str(tmp_path / "slow.py")), timeout=1000.0)
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        score(scorer, [slow, python_reward(tmp_path, FAILS)], make_group(1, "5"))


def test_a_stopped_task_stops_its_rewards(scorer: RewardScorer, tmp_path: Path) -> None:
    slow = python_reward(tmp_path, "import time; time.sleep(1000)")
    with pytest.raises(TaskError) as raised:
        scorer.score([slow], [make_group(0, "4")], SamplingSettings(), stopped=lambda: True)
    assert (raised.value.reason, raised.value.retryable) == ("drained", True)


@pytest.mark.parametrize("file", ["missing.py", "memory://nowhere/missing.py"])
def test_a_missing_file_is_named(scorer: RewardScorer, file: str, tmp_path: Path) -> None:
    uri = file if "://" in file else str(tmp_path / file)
    with pytest.raises(TaskError, match=f"reward 'mine' .*{file}") as raised:
        score(scorer, [RewardSettings(name="mine", python=PythonReward(file=uri))], make_group(0, "4"))
    assert raised.value.reason == "reward_failed"


def test_a_missing_function_is_answered_with_those_there_are(scorer: RewardScorer, tmp_path: Path) -> None:
    mine = python_reward(tmp_path, "return 1")
    assert mine.python is not None
    other = mine.model_copy(update={"python": PythonReward(file=mine.python.file, function="rewrad")})
    with pytest.raises(TaskError, match=r"has no function 'rewrad'; it has reward: set python\.function"):
        score(scorer, [other], make_group(0, "4"))


def test_a_file_may_be_in_any_store(scorer: RewardScorer) -> None:
    with fsspec.open("memory://rewards/mine.py", "w") as file:
        file.write("def reward(completions): return [len(c) for c in completions]")
    mine = RewardSettings(name="mine", python=PythonReward(file="memory://rewards/mine.py"))
    assert score(scorer, [mine], make_group(0, "4", "four")).totals == [[1.0, 4.0]]


def test_a_file_may_import_its_neighbours(scorer: RewardScorer, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("bonus = 0.25")
    (tmp_path / "mine.py").write_text("import neighbour\ndef reward(completions): return [neighbour.bonus]")
    mine = RewardSettings(name="mine", python=PythonReward(file=str(tmp_path / "mine.py")))
    assert score(scorer, [mine], make_group(0, "4")).totals == [[0.25]]


def test_verls_form_is_chosen_by_style(scorer: RewardScorer, tmp_path: Path) -> None:
    (tmp_path / "verl.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'length': len(solution_str)}\n"
    )
    python = PythonReward(file=str(tmp_path / "verl.py"), function="compute_score", style="verl")
    scores = score(scorer, [RewardSettings(name="mine", python=python)], make_group(0, "4", "four"))
    assert scores.totals == [[1.0, 0.0]]
    assert (scores.metrics["reward/mine/length/sum"], scores.metrics["reward/mine/length/count"]) == (5.0, 2.0)


@pytest.mark.parametrize("where", ["{}", "memory:/{}"])
@pytest.mark.parametrize(
    "code",
    [
        "def extract(solution_str): return solution_str[-1]\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(extract(solution_str) == '4')",
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(each == '4') for each in solution_strs]",
        "def reward_func(queries, prompts, labels): return {'rewards': [float(each[-1] == '4') for each in queries]}",
        "async def accuracy(completions, **columns): return [float(each == '4') for each in completions]",
    ],
)  # fmt: skip
def test_a_files_only_reward_needs_no_name(scorer: RewardScorer, tmp_path: Path, code: str, where: str) -> None:
    place = where.format(tmp_path / "mine.py")
    with fsspec.open(place, "w") as file:
        file.write(code)
    mine = RewardSettings(name="mine", python=PythonReward(file=place))
    assert score(scorer, [mine], make_group(0, "4", "5")).totals == [[1.0, 0.0]]


def test_math_runs_where_its_alarms_work(scorer: RewardScorer) -> None:
    math = RewardSettings(name="math", math=MathReward())
    assert score(scorer, [math], make_group(0, r"\boxed{4}"), make_group(1, "5")).totals == [[1.0], [0.0]]


def test_a_pathological_pattern_scores_0_past_its_time_and_is_counted(scorer: RewardScorer) -> None:
    hopeless = RewardSettings(name="format", format=FormatReward(pattern="(a+)+", timeout=0.2))
    scores = score(scorer, [hopeless], make_group(0, "a" * 64 + "b", "aaa"), make_group(1, "aaa"))
    assert scores.totals == [[0.0, 1.0], [1.0]]
    assert scores.metrics["reward/format/timed_out/sum"] == 1
    assert scores.metrics["reward/format/timed_out/count"] == 3
    assert scores.metrics["reward/format/crashed/sum"] == 0


def test_a_job_without_rewards_scores_nothing(scorer: RewardScorer) -> None:
    assert score(scorer, [], make_group(0, "4")).totals == [[None]]
