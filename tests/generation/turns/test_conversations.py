"""Samples with an environment: their turns leave the batch, are answered, and go on by themselves."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhfless_functions.api import (
    AddSamples,
    GenerationRequest,
    Join,
    Line,
    LiveBatch,
    NewWeights,
    NextWeights,
    Partial,
    Samples,
    Shelter,
)
from rlhfless_functions.data.prompts import read_prompts
from rlhfless_functions.data.rollouts import GeneratedSample, VersionSpan, read_rollouts, write_rollouts
from rlhfless_functions.environments.episodes import Observation, Turn
from rlhfless_functions.generation import stage
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import EnvironmentSettings, PythonEnvironment, SamplingSettings
from tests.generation.shares import Outcome, Ticks
from tests.generation.shares import make_request as make_request  # The fixtures.
from tests.generation.shares import prompts as prompts
from tests.generation.test_prefetched_requests import make_version
from tests.generation.turns.games import TURNS, Game, answer_to

Make = Callable[..., GenerationRequest]


def play(
    request: GenerationRequest, game: Game | None = None, *, stop_at: int | None = None, step: float = 0.01
) -> Outcome:
    """Run a request with an environment; `stop_at`: the reading of the clock at which it is cut."""
    its_game, events = game or Game(), list[Any]()
    context = TaskContext(emit=events.append)
    at = {} if stop_at is None else {stop_at: lambda: context.stop("cut")}
    generator = Generator(clock=Ticks(step, at=at), episodes_of=lambda _: its_game)
    result = generator.run(request, context)
    assert its_game.closed == 1
    return Outcome(result, events)


@pytest.fixture
def make(make_request: Make) -> Make:
    """Make requests whose responses have room for several turns."""
    room = SamplingSettings(max_prompt_tokens=50, max_response_tokens=90)
    return lambda sink="sink", **changes: make_request(sink, **changes, sampling=room)


@pytest.fixture
def plain(make: Make) -> dict[tuple[int, int], GeneratedSample]:
    """All samples of the share, whose environments answer at once."""
    found = play(make("plain")).finished()
    assert {sample.finish_reason for sample in found.values()} == {"stop", "truncated"}
    assert max(len(sample.given) for sample in found.values()) == TURNS
    return found


def test_an_answer_is_appended_to_the_response_and_the_next_turn_follows_it(make: Make) -> None:
    game = Game()
    found = play(make(), game).finished()
    assert len(found) == 20
    for key, sample in found.items():
        turns = [turn for turn in game.turns if turn.sample == key]
        assert not turns[0].response
        for turn, later in pairwise(turns):
            answer = answer_to(turn)
            length = len(turn.response)
            assert list(later.response[:length]) == list(turn.response)
            assert later.response[length : length + len(answer.tokens)] == answer.tokens
            assert list(later.given) == [*turn.given, (length, length + len(answer.tokens))]
        last = answer_to(turns[-1])
        assert last.outcome is not None
        assert sample.response_tokens == list(turns[-1].response)
        assert sample.given == list(turns[-1].given)
        assert sample.outcome == {**vars(last.outcome), "tool_errors": {}}
        assert sample.finish_reason == ("truncated" if last.outcome.ended == "maxTokens" else "stop")


def test_log_probabilities_are_those_of_the_model_and_zero_at_given_tokens(
    make: Make, tiny_model: Path, plain: dict[tuple[int, int], GeneratedSample]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for sample in plain.values():
        tokens = torch.tensor([*sample.prompt_tokens, *sample.response_tokens])
        with torch.inference_mode():
            every = torch.log_softmax(model(input_ids=tokens[None]).logits[0, len(sample.prompt_tokens) - 1 : -1], -1)
        theirs = every.gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
        for start, end in sample.given:
            theirs[start:end] = 0.0
            assert sample.log_probs[start:end] == [0.0] * (end - start)
        torch.testing.assert_close(torch.tensor(sample.log_probs), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_samples_depend_neither_on_when_answers_come_nor_on_who_generates(
    make: Make, plain: dict[tuple[int, int], GeneratedSample], seed: int
) -> None:
    samples, found = make().samples, dict[tuple[int, int], GeneratedSample]()
    for actor in range(3):
        request = make(f"actor-{actor}", samples=samples[actor::3], kv_budget_tokens=160 * (1 + 2 * actor))
        found |= play(request, Game(delay=25 * actor, seed=seed)).finished()
    assert found == plain


def test_other_samples_go_on_while_one_is_away(make: Make) -> None:
    request, finished = make(), list[tuple[int, int]]()
    slow = (0, 0)

    class Slow(Game):
        def ready(self, wait_seconds: float) -> list[Observation]:
            answers = super().ready(wait_seconds)
            finished.extend(answer.sample for answer in answers if answer.done)
            if len(finished) < 19:
                self._due += [(0, turn) for turn in self.turns[-100:] if turn.sample == slow and answers_to(answers)]
            return [answer for answer in answers if answer.sample != slow or len(finished) >= 19]

    def answers_to(answers: list[Observation]) -> bool:
        return any(answer.sample == slow for answer in answers)

    assert len(play(request, Slow()).finished()) == 20
    assert finished[-1] == slow


def test_an_observation_is_stored_before_the_next_turn_is_sampled(make: Make) -> None:
    request, seen = make(), 0

    class Suspicious(Game):
        def submit(self, turn: Turn) -> None:
            nonlocal seen
            super().submit(turn)
            if turn.given:
                stored = read_rollouts([str(part) for part in Path(request.sink).glob("*.parquet")])[turn.sample]
                _, end = turn.given[-1]
                assert stored.response_tokens[:end] == list(turn.response[:end])
                assert stored.given == list(turn.given)
                seen += 1

    play(request, Suspicious())
    assert seen > 20


@pytest.mark.parametrize("stop_at", [3, 8, 15, 24, 40, 70])
def test_a_share_that_was_cut_goes_on_from_its_recorded_turns(
    make: Make, plain: dict[tuple[int, int], GeneratedSample], stop_at: int
) -> None:
    game, again = Game(delay=20, seed=stop_at), Game(seed=1)
    first = play(make("first"), game, stop_at=stop_at)
    second = play(make("second", resume_from=[make("first").sink]), again)
    assert second.finished() == plain
    asked = {(turn.sample, tuple(turn.response)) for turn in again.turns}
    assert {(turn.sample, tuple(turn.response)) for turn in game.unanswered} <= asked
    assert not {turn.sample for turn in again.turns if not turn.response} & {key for key, _ in first.announced(Partial)}


@pytest.mark.parametrize("join_at", [5, 40, 150])
def test_samples_that_join_a_batch_go_on_from_their_recorded_turns(
    make: Make, plain: dict[tuple[int, int], GeneratedSample], join_at: int
) -> None:
    whole = make("live")
    moved, elsewhere = whole.samples[10:], make("elsewhere", samples=whole.samples[10:], flush_seconds=0.05)
    first = play(elsewhere, Game(), stop_at=70)
    assert first.announced(Partial), "it was in the middle of turns"
    inbox, events = Inbox(), list[Any]()
    context = TaskContext(emit=events.append, inbox=inbox)

    def join() -> None:
        inbox.put(AddSamples(sink=whole.sink, samples=moved, resume_from=[elsewhere.sink]))
        inbox.close()

    generator = Generator(clock=Ticks(at={join_at: join}), episodes_of=lambda _: Game())
    live = LiveBatch(sequences=20, prompt_tokens=50)
    request = whole.model_copy(update={"samples": whole.samples[:10], "live": live})
    result = generator.run(request, context)
    assert (result.finished, result.unfinished) == (20, 0)
    assert Outcome(result, events).finished() == plain


def live(
    request: GenerationRequest, lines: dict[int, Line | None], games: dict[str, Game], *, sequences: int = 20
) -> Outcome:
    """Run a live request; lines come at these readings of its clock, and None ends it. Each sink has a game."""
    inbox, events = Inbox(), list[Any]()

    def send(line: Line | None) -> Callable[[], None]:
        return lambda: inbox.close() if line is None else inbox.put(line)

    clock = Ticks(at={reading: send(line) for reading, line in lines.items()})
    generator = Generator(clock=clock, episodes_of=lambda asked: games[asked.sink])
    batch = LiveBatch(sequences=sequences, prompt_tokens=50)
    result = generator.run(request.model_copy(update={"live": batch}), TaskContext(emit=events.append, inbox=inbox))
    assert [game.closed for game in games.values()] == [1] * len(games)
    return Outcome(result, events)


@pytest.mark.parametrize("delay", [0, 30])
def test_shares_of_two_steps_have_environments_of_their_own_in_one_batch(make: Make, delay: int) -> None:
    one = make("one")
    two = make("two", key=one.key.model_copy(update={"step": one.key.step + 1}))
    games = {each.sink: Game(delay=delay, seed=seed) for seed, each in enumerate((one, two))}
    outcome = live(one, {30: Join(request=two), 31: None}, games)
    for request in (one, two):
        told = [event for event in outcome.events if isinstance(event, Samples) and event.of == request.sink]
        alone = play(request.model_copy(update={"sink": f"{request.sink}-alone"})).finished()
        assert Outcome(outcome.result, told).finished() == alone
        assert {turn.sample for turn in games[request.sink].turns} == alone.keys()


@pytest.mark.parametrize("at", [15, 40, 90])
@pytest.mark.parametrize("delay", [0, 30])
def test_conversations_go_on_with_newer_weights(
    make: Make, plain: dict[tuple[int, int], GeneratedSample], tmp_path: Path, at: int, delay: int
) -> None:
    third = make_version(make, str(tmp_path / "weights"))
    request = make("live", oldest_version=2)
    weights = NewWeights(present=NextWeights(weights=third))
    found = live(request, {at: weights, at + 1: None}, {request.sink: Game(delay=delay)}).finished()
    assert found.keys() == plain.keys()
    part = str(tmp_path / "begun" / "part-000000.parquet")
    switched = {key: each for key, each in found.items() if len(each.versions) == 2}
    assert switched, "some had begun and not ended"
    write_rollouts(part, [begun(each, each.versions[0].end) for each in switched.values()])
    alone = make("alone", weights=third, oldest_version=2, resume_from=[part])
    continued = play(alone).finished()
    assert {key: continued[key] for key in switched} == switched, "as if a request had continued them"
    for key, each in found.items():
        if [span.version for span in each.versions] == [2]:
            assert each == plain[key]
        if [span.version for span in each.versions] == [3]:
            assert each == continued[key]


def test_an_episode_that_begins_anew_after_newer_weights_has_only_their_version(make: Make, tmp_path: Path) -> None:
    third = make_version(make, str(tmp_path / "weights"))
    request = make("live", oldest_version=2)

    def anew(turn: Turn) -> Observation:
        answer = answer_to(turn)
        return replace(answer, tokens=[3], done=False, outcome=None, restarted=True) if lost(turn) else answer

    def lost(turn: Turn) -> bool:
        first = turn.sample not in again and len(turn.given) == 2
        again.update({turn.sample} if first else ())
        return first

    again = set[tuple[int, int]]()
    weights = NewWeights(present=NextWeights(weights=third))
    found = live(request, {25: weights, 26: None}, {request.sink: Game(delay=60, answer=anew)}).finished()
    assert again
    newest = {key: [span.version for span in found[key].versions] for key in again}
    assert [3] in newest.values() and [2, 2] not in newest.values()
    for each in found.values():
        assert each.versions[-1].end == len(each.response_tokens)


def begun(sample: GeneratedSample, end: int) -> GeneratedSample:
    """A sample as it was at its first `end` tokens."""
    given = [(start, stop) for start, stop in sample.given if stop <= end]
    was_away = any(start == end for start, _ in sample.given)
    return replace(
        sample,
        response_tokens=sample.response_tokens[:end],
        log_probs=sample.log_probs[:end],
        finish_reason="turn" if was_away else "cut",
        versions=[VersionSpan(sample.versions[0].version, 0, end)],
        given=given,
        outcome=None,
    )


def test_an_episode_that_begins_anew_throws_its_response_away(
    make: Make, plain: dict[tuple[int, int], GeneratedSample]
) -> None:
    lost: set[tuple[int, int]] = set()

    def forgetful(turn: Turn) -> Observation:
        if len(turn.given) == 2 and turn.sample not in lost:
            lost.add(turn.sample)
            return replace(answer_to(replace(turn, response=(), given=(), truncated=False, room=90)), restarted=True)
        return answer_to(turn)

    assert play(make(), Game(answer=forgetful)).finished() == plain
    assert len(lost) > 5


def test_reports_count_sampled_tokens_alone(make: Make, plain: dict[tuple[int, int], GeneratedSample]) -> None:
    outcome = play(make())
    told = {
        (sample.prompt, sample.index): sample.tokens
        for event in outcome.events
        if isinstance(event, Samples)
        for sample in event.samples
    }
    assert told == {key: sample.sampled_tokens for key, sample in plain.items()}
    assert outcome.result.response_tokens == sum(told.values())


def test_a_fault_of_the_environments_ends_the_request_and_loses_nothing(make: Make) -> None:
    def faulty(turn: Turn) -> Observation:
        if len(turn.given) == 2:
            raise TaskError("internal", "the environment is broken")
        return answer_to(turn)

    game = Game(answer=faulty)
    with pytest.raises(TaskError, match="broken"):
        play(make(), game)
    assert game.closed == 1
    stored = read_rollouts([str(part) for part in Path(make().sink).glob("*.parquet")])
    assert {sample.finish_reason for sample in stored.values()} >= {"turn"}


def test_an_environment_sees_the_row_of_the_dataset(make: Make, prompts: str) -> None:
    game = Game()
    play(make(), game)
    rows = {prompt.row: prompt for prompt in read_prompts(prompts)}
    assert all(turn.row == {"prompt": rows[turn.sample[0]].text, "ground_truth": None} for turn in game.turns)


def test_answers_without_tokens_begin_an_episode_at_once(make: Make) -> None:
    found = play(make(), Game(answer=lambda turn: answer_to(turn, head=0))).finished()
    assert all(not sample.given or sample.given[0][0] > 0 for sample in found.values())


class Beginning(Game):
    """Environments that begin, and answer nothing after that."""

    def ready(self, wait_seconds: float) -> list[Observation]:
        due = [turn for _, turn in self._due if not turn.response]
        self._due = [(at, turn) for at, turn in self._due if turn.response]
        return [self.answer(turn) for turn in due]


def test_a_request_ends_once_all_samples_have_waited_too_long_and_the_next_one_goes_on(
    make: Make, plain: dict[tuple[int, int], GeneratedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = PythonEnvironment(file="env.py", class_name="Env")
    shelter = Shelter(url="http://127.0.0.1:1", token="t", rollout="training-1", actors=2, patience_seconds=0.5)
    changes = {"environment": EnvironmentSettings(python=python), "shelter": shelter}
    games = [Beginning(), Game()]
    monkeypatch.setattr(stage, "ShelteredEpisodes", lambda *_: games[0])
    first = play(make("first", **changes), games[0])
    assert first.result.all_wait and (first.result.finished, first.result.unfinished) == (0, 20)
    assert first.result.waited_seconds > 0
    assert {len(turn.given) for turn in games[0].unanswered} == {1}
    monkeypatch.setattr(stage, "ShelteredEpisodes", lambda *_: games[1])
    second = play(make("second", resume_from=[make("first").sink], **changes), games[1])
    assert not second.result.all_wait and second.result.unfinished == 0
    assert second.finished() == plain
    assert {(turn.sample, tuple(turn.response)) for turn in games[0].unanswered} <= {
        (turn.sample, tuple(turn.response)) for turn in games[1].turns
    }, "the same turns are handed over again"


def test_a_sample_that_comes_back_goes_ahead_of_those_that_have_not_begun(make: Make) -> None:
    game = Game()
    request = make()
    play(request.model_copy(update={"kv_budget_tokens": 150}), game)
    began = [turn.sample for turn in game.turns if not turn.response]
    order = [turn.sample for turn in game.turns if turn.response]
    # Few samples at a time have room. The first ones are at their last turn while others wait for their first.
    assert order.index(began[-1]) > max(place for place, sample in enumerate(order) if sample == began[0])
