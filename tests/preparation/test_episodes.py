"""Episodes as rewards and metrics see them."""

from typing import Any

from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.preparation.chunk_metrics import chunk_metrics
from rlhfless_functions.preparation.reward_groups import head, reward_group, with_episodes
from rlhfless_functions.preparation.stage import episode_messages
from rlhfless_functions.rewards.callables import scorer_of
from rlhfless_functions.rewards.calls import Call
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.settings import EnvironmentReward, LengthReward, RewardSettings, SamplingSettings
from tests.environments.chat import make_tokenizer

TOKENIZER = make_tokenizer()
OUTCOME = {
    "score": 1.0,
    "turns": 2,
    "ended": "answered",
    "tool_errors": {"raised": 3},
    "seconds_away": 0.5,
    "restarted": 1,
    "dropped": False,
}


def _sample(index: int, *parts: tuple[str, bool], **outcome: Any) -> PreparedSample:
    """A sample of texts, each sampled or given."""
    tokens: list[int] = []
    given = []
    for text, is_given in parts:
        new = TOKENIZER.encode(text, add_special_tokens=False)
        if is_given:
            given.append((len(tokens), len(tokens) + len(new)))
        tokens += new
    return PreparedSample(
        prompt=0,
        index=index,
        prompt_tokens=[1],
        response_tokens=tokens,
        log_probs=[0.0] * len(tokens),
        finish_reason="stop",
        versions=[],
        given=given,
        outcome={**OUTCOME, **outcome},
    )


def _group(*samples: PreparedSample) -> RewardGroup:
    prompt = Prompt(row=0, tokens=[1], text="q", messages=[{"role": "user", "content": "q"}])
    texts = [TOKENIZER.decode(sample.response_tokens[head(sample.given) :]) for sample in samples]
    made = reward_group(prompt, texts, [sample.response_tokens for sample in samples], ["stop"] * len(samples))
    return with_episodes(made, samples, TOKENIZER)


TALK = _sample(0, ("head", True), ("look", False), ("a wall", True), ("back", False))


def test_rewards_see_the_conversation_without_the_prompts_end() -> None:
    group = _group(TALK)
    assert group.completions == ["looka wallback"]
    seen: list[Any] = []

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [1.0]

    assert scorer_of(reward)(group, Call()) == [1.0]
    assert seen == [
        [
            {"role": "assistant", "content": "look"},
            {"role": "tool", "content": "a wall"},
            {"role": "assistant", "content": "back"},
        ]
    ]


def test_people_see_the_conversation_from_what_the_environment_began_with() -> None:
    assert episode_messages(TALK, TOKENIZER) == [
        {"role": "user", "content": "head"},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "a wall"},
        {"role": "assistant", "content": "back"},
    ]
    alone = _sample(0, ("answer", False))
    alone.outcome = None
    assert episode_messages(alone, TOKENIZER) == []


def test_the_environments_score_is_a_term_beside_others_and_a_dropped_sample_has_no_reward() -> None:
    lost = _sample(1, ("look", False), score=None, dropped=True)
    rewards = [
        RewardSettings(name="solved", weight=2.0, environment=EnvironmentReward()),
        RewardSettings(name="short", length=LengthReward(buffer_tokens=1)),
    ]
    scores = RewardScorer().score(rewards, [_group(TALK, lost)], SamplingSettings(max_response_tokens=100))
    assert scores.terms["solved"] == [[1.0, None]]
    assert scores.totals == [[2.0, None]]
    assert scores.metrics["reward/unscorable/count"] == 1


def test_metrics_count_turns_errors_and_endings() -> None:
    metrics = chunk_metrics([1], [TALK, _sample(1, ("x", False), ended="toolSeconds", turns=4)], [])
    assert metrics["environment/turns/sum"] == 6 and metrics["environment/turns/count"] == 2
    assert metrics["environment/given/sum"] == sum(end - start for start, end in TALK.given)
    assert metrics["environment/errors/raised/count"] == 6
    assert metrics["environment/ended/toolSeconds/sum"] == 1
    assert metrics["environment/restarted/count"] == 2
