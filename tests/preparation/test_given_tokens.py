"""Preparation of samples with tokens that an environment gave."""

from dataclasses import asdict

import pytest

from rlhfless_functions.api import SampledTokens
from rlhfless_functions.data.rollouts import GeneratedSample, VersionSpan
from rlhfless_functions.data.traces import read_trace_rows
from rlhfless_functions.environments.episodes import Outcome
from rlhfless_functions.settings import AlgorithmSettings
from tests.preparation.batches import KL, BatchFolder
from tests.preparation.batches import place as place  # The fixtures.
from tests.preparation.batches import preparer as preparer

OUTCOME = Outcome(score=1.0, turns=2, ended="answered")

pytestmark = pytest.mark.usefixtures("warm_start")


@pytest.fixture
def conversations(place: BatchFolder) -> BatchFolder:
    """A group of two: the first has tokens 3 to 6 from an environment, sampled by two versions; the second has none."""
    place.materialize([{"prompt": "2 + 2", "answer": "4"}])
    tokens = [5, 6, 7, 8, 9, 10, 11, 1]
    log_probs = [-1.0, -1.0, -1.0, 0.0, 0.0, 0.0, -1.0, -1.0]
    spans = [VersionSpan(2, 0, 5), VersionSpan(3, 5, 8)]
    place.add(
        [
            GeneratedSample(0, 0, [3, 4], tokens, log_probs, "stop", spans, [(3, 6)], asdict(OUTCOME)),
            GeneratedSample(0, 1, [3, 4], [5, 1], [-1.0, -1.0], "stop", [VersionSpan(3, 0, 2)]),
        ]
    )
    return place


def test_lists_of_numbers_have_zeros_at_given_tokens(conversations: BatchFolder) -> None:
    algorithm = AlgorithmSettings(name="ppo", kl=KL.model_copy(update={"placement": "reward", "estimator": "k1"}))
    _, (talk, plain) = conversations.prepare(
        algorithm=algorithm.resolved(), old_log_probs=True, reference=conversations.initial
    )
    for name in ("old_log_probs", "reference_log_probs", "advantages", "returns"):
        numbers = getattr(talk, name)
        assert len(numbers) == 8
        assert numbers[3:6] == [0.0] * 3
        assert all(numbers[:3] + numbers[6:]) or name in ("advantages", "returns")
    assert (talk.given, talk.outcome) == ([(3, 6)], asdict(OUTCOME))
    assert (plain.given, plain.outcome) == ([], None)


def test_versions_lengths_and_metrics_count_sampled_tokens(conversations: BatchFolder) -> None:
    trace = str(conversations.folder / "trace.parquet")
    result, _ = conversations.prepare(
        trace=trace, old_log_probs=True, reference=conversations.initial, algorithm=AlgorithmSettings(kl=KL).resolved()
    )
    assert result.groups[0].sampled == [SampledTokens(version=2, tokens=3), SampledTokens(version=3, tokens=4)]
    assert result.groups[0].switched_responses == 1
    assert result.metrics["lengths/sum"] == 5 + 2
    assert result.metrics["kl/reference/count"] == 5 + 2
    assert read_trace_rows(trace).response_tokens.tolist() == [5, 2]


def test_a_version_that_sampled_nothing_does_not_count(place: BatchFolder) -> None:
    place.materialize([{"prompt": "2 + 2", "answer": "4"}])
    spans = [VersionSpan(2, 0, 3), VersionSpan(3, 3, 5)]
    place.add([GeneratedSample(0, 0, [3, 4], [5, 6, 7, 8, 1], [0.0] * 3 + [-1.0] * 2, "stop", spans, [(0, 3)])])
    result, _ = place.prepare()
    assert result.groups[0].switched_responses == 0
    assert [each.tokens for each in result.groups[0].sampled if each.tokens] == [2]
