"""Plays the episodes of a share: a thread for each turn that is away, a session for each episode."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhfless_functions.environments.bridge import Bridge, BridgeError, Call
from rlhfless_functions.environments.episodes import Observation, Outcome, SampleKey, Turn, gathered
from rlhfless_functions.environments.sessions import (
    EpisodeFailedError,
    EpisodeKilledError,
    EpisodeLateError,
    Host,
    Session,
    SessionLostError,
)
from rlhfless_functions.environments.tool_calls import CallParser, Unread
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings

_log = logging.getLogger("rlhfless.environments")

_MOST_EPISODES = 256
"""Most episodes of an actor that have begun and not ended. Others wait for their beginning."""
_KILLS = 2
"""Most kills from outside after which a turn is tried again."""


class _DivergedError(Exception):
    """A replayed episode gave other tokens than before."""


@dataclass
class _Live:
    """An episode that goes on."""

    session: Session
    turns: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    away: float = 0.0
    """Seconds in which the sample waited."""
    spent: float = 0.0
    """Seconds of its calls."""


@dataclass(frozen=True)
class _Answer:
    """The continuation after a turn."""

    tokens: list[int]
    ended: str | None = None


class PlayedEpisodes:
    """The environments of a share.

    Args:
        settings: the job's environment.
        host: returns a host that runs.
        bridge: the template's tokens between turns.
        parser: reads the model's calls.
        tokenizer: decodes the model's turns.
        stop_tokens: ids that end a turn.
        actors: number of actors whose samples these are.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        host: Callable[[], Host],
        bridge: Bridge,
        parser: CallParser,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: Sequence[int],
        actors: int = 1,
    ) -> None:
        self._settings = settings
        self._host = host
        self._bridge = bridge
        self._parser = parser
        self._tokenizer = tokenizer
        self._stop = frozenset(stop_tokens)
        self._most = _MOST_EPISODES * actors
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="episode")
        self._answers: queue.SimpleQueue[Observation | Exception] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._live: dict[SampleKey, _Live] = {}
        self._restarts: Counter[SampleKey] = Counter()
        self._begun: set[SampleKey] = set()
        self._waiting: deque[tuple[Turn, float]] = deque()
        self._closed = False

    def submit(self, turn: Turn) -> None:
        """Hand a turn over; see `Episodes`."""
        now = time.monotonic()
        with self._lock:
            if turn.sample not in self._begun:
                if len(self._begun) >= self._most:
                    self._waiting.append((turn, now))
                    return
                self._begun.add(turn.sample)
        self._threads.submit(self._run, turn, now)

    def ready(self, wait_seconds: float) -> list[Observation]:
        """Return the answers that have come; see `Episodes`.

        Raises:
            TaskError: `environment_failed`, if the environment can't begin, or fails and the job is to end then.
        """
        return gathered(self._answers, wait_seconds)

    def close(self) -> None:
        """End all episodes."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            live = list(self._live.values())
        for each in live:
            each.session.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    # --- one turn, in a thread of its own ------------------------------------------------------------------------

    def _run(self, turn: Turn, since: float) -> None:
        try:
            answer: Observation | Exception = self._answer(turn, since)
        except Exception as error:
            answer = error
        if isinstance(answer, Exception) or answer.done:
            self._end(turn.sample)
        if not self._closed:
            self._answers.put(answer)

    def _answer(self, turn: Turn, since: float) -> Observation:
        kills = 0
        while True:
            try:
                return self._once(turn, since)
            except (EpisodeKilledError, _DivergedError) as error:
                with self._lock:
                    if self._closed:
                        raise
                kills += 1
                self.forget(turn.sample)
                if kills > _KILLS:
                    return self._given_up(turn, since, error, kills)
                if turn.response and (not self._settings.replayable or isinstance(error, _DivergedError)):
                    return self._anew(turn, since)

    def _given_up(self, turn: Turn, since: float, error: Exception, kills: int) -> Observation:
        """End an episode whose session is lost again and again.

        Raises:
            TaskError: `environment_failed`, unless the server drops it at one of the model's turns.
        """
        if turn.response and isinstance(error, SessionLostError):
            live = _Live(session=self._host().begin(), turns=len(turn.given))
            self._live[turn.sample] = live
            answer = self._failed(turn, "failed", EpisodeFailedError(f"{error}, {kills} times"))
            return self._told(turn, answer, since)
        remedy = f"; {error.remedy}" if isinstance(error, EpisodeKilledError) else ""
        raise TaskError(
            "environment_failed",
            f"the environment of row {turn.sample[0]} {error}, {kills} times{remedy}",
            retryable=True,
        ) from error

    def _once(self, turn: Turn, since: float) -> Observation:
        if not turn.response:
            _, answer = self._begun_with(turn)
            return self._told(turn, answer, since)
        live = self._live.get(turn.sample)
        if live is None and not self._settings.replayable:
            return self._anew(turn, since)
        live = live or self._replayed(turn)
        start = turn.given[-1][1] if turn.given else 0
        answer = self._act(live, turn, turn.response[start:], turn.room, truncated=turn.truncated)
        return self._told(turn, answer, since)

    def _anew(self, turn: Turn, since: float) -> Observation:
        """Begin a sample anew, because its environment is lost."""
        live, answer = self._begun_with(turn)
        self._restarts[turn.sample] += 1
        live.away += time.monotonic() - since
        return Observation(turn.sample, answer.tokens, restarted=True)

    def _told(self, turn: Turn, answer: _Answer, since: float) -> Observation:
        live = self._live[turn.sample]
        live.away += time.monotonic() - since
        if answer.ended is None:
            return Observation(turn.sample, answer.tokens)
        return Observation(turn.sample, done=True, outcome=self._outcome(turn, live, answer.ended))

    def _begun_with(self, turn: Turn) -> tuple[_Live, _Answer]:
        """Begin an episode."""
        live = _Live(self._host().begin())
        with self._lock:
            self._live[turn.sample] = live
            if self._closed:
                live.session.close()
        text = None
        try:
            text = self._ask(live, {"do": "begin", "seed": turn.seed, "row": dict(turn.row)})["text"]
            tokens = self._bridge.opening(text or "") if self._settings.is_scored else []
        except (EpisodeFailedError, BridgeError) as error:
            raise TaskError(
                "environment_failed",
                f"the environment can't begin an episode (row {turn.sample[0]} of the prompts): it {error}; correct it"
                " or the row",
                retryable=isinstance(error, EpisodeFailedError) and error.retryable,
            ) from error
        total = turn.room + len(turn.response)
        if len(tokens) >= total:
            raise TaskError(
                "environment_failed",
                f"the text with which the environment begins has {len(tokens)} tokens (row {turn.sample[0]}), but"
                f" sampling.maxResponseTokens is {total}; raise it, or shorten the text",
            )
        return live, _Answer(tokens)

    def _replayed(self, turn: Turn) -> _Live:
        """Bring an episode to where it was by its recorded turns.

        Raises:
            _DivergedError: it gave other tokens than before.
        """
        live, answer = self._begun_with(turn)
        total = len(turn.response) + turn.room
        place = 0
        for start, end in turn.given:
            if start > place:
                answer = self._act(live, turn, turn.response[place:start], total - start, truncated=False)
            if answer.ended is not None or list(answer.tokens) != list(turn.response[start:end]):
                raise _DivergedError
            place = end
        return live

    def _act(self, live: _Live, turn: Turn, tokens: Sequence[int], room: int, *, truncated: bool) -> _Answer:
        """Give the environment a turn of the model, and return what follows."""
        live.turns += 1
        if truncated:
            return _Answer([], "maxTokens")
        last = tokens[-1] if tokens else None
        spoken = tokens[:-1] if last in self._stop else tokens
        text = str(self._tokenizer.decode(list(spoken), skip_special_tokens=False))
        try:
            given = self._stepped(live, text, last) if self._host().is_game else self._called(live, text, last)
        except EpisodeLateError as error:
            late = "episodeSeconds" if live.spent >= self._settings.episode_seconds else "toolSeconds"
            return self._failed(turn, late, error)
        except (EpisodeFailedError, BridgeError) as error:
            return self._failed(turn, "failed", error)
        if given.ended is not None:
            return given
        if live.turns >= self._settings.max_turns:
            return _Answer([], "maxTurns")
        if len(given.tokens) >= room:
            return _Answer([], "maxTokens")
        return given

    def _stepped(self, live: _Live, text: str, last: int | None) -> _Answer:
        answer = self._ask(live, {"do": "step", "text": text})
        if "fault" in answer:
            live.errors[answer["fault"]] += 1
        if answer["done"]:
            return _Answer([], "finished")
        return _Answer(self._bridge.after_text(last, answer["text"]))

    def _called(self, live: _Live, text: str, last: int | None) -> _Answer:
        calls = self._parser.calls(text)
        if not calls:
            return _Answer([], "answered")
        results = []
        for call in calls:
            result, done = self._result(live, call)
            if done:
                return _Answer([], "finished")
            results.append(result)
        named = [call if isinstance(call, Call) else Call("unknown", {}) for call in calls]
        return _Answer(self._bridge.after_calls(last, named, results))

    def _result(self, live: _Live, call: Call | Unread) -> tuple[str, bool]:
        """Return the result of a call for the model, and whether the episode is over."""
        if isinstance(call, Unread):
            live.errors["unparsed"] += 1
            return f"Error: {call.reason}", False
        answer = self._ask(live, {"do": "call", "name": call.name, "arguments": call.arguments})
        if "fault" in answer:
            live.errors[answer["fault"]] += 1
            return f"Error: {answer['message']}", bool(answer.get("done"))
        return str(answer["result"]), bool(answer.get("done"))

    def _failed(self, turn: Turn, ended: str, error: Exception) -> _Answer:
        if self._settings.on_failure == "fail":
            raise TaskError(
                "environment_failed",
                f"the environment {error} (row {turn.sample[0]} of the prompts); correct it, or set"
                " environment.onFailure to score or drop",
            ) from error
        _log.warning("the environment of row %d %s", turn.sample[0], error)
        return _Answer([], ended)

    def _outcome(self, turn: Turn, live: _Live, ended: str) -> Outcome:
        score = None
        failed = ended in ("toolSeconds", "episodeSeconds", "failed")
        if self._settings.is_scored and not failed:
            try:
                score = self._ask(live, {"do": "score"})["score"]
            except EpisodeFailedError as error:
                ended = self._failed(turn, "failed", error).ended or ended
                failed = True
        if failed and self._settings.is_scored:
            score = 0.0
        dropped = failed and self._settings.on_failure == "drop"
        return Outcome(
            score=None if dropped else score,
            turns=live.turns,
            ended=ended,
            tool_errors=dict(live.errors),
            seconds_away=round(live.away, 4),
            restarted=self._restarts[turn.sample],
            dropped=dropped,
        )

    def _ask(self, live: _Live, request: dict[str, Any]) -> dict[str, Any]:
        left = max(0.01, self._settings.episode_seconds - live.spent)
        began, waited = time.monotonic(), live.session.waited
        try:
            return live.session.ask(request, min(self._settings.tool_seconds, left), self._settings.memory)
        finally:
            live.spent += time.monotonic() - began - (live.session.waited - waited)

    def forget(self, sample: SampleKey) -> None:
        """End an episode's session, to begin it again."""
        live = self._live.pop(sample, None)
        if live is not None:
            live.session.close()

    def _end(self, sample: SampleKey) -> None:
        with self._lock:
            live = self._live.pop(sample, None)
            self._begun.discard(sample)
            following = self._waiting.popleft() if self._waiting and not self._closed else None
            if following is not None:
                self._begun.add(following[0].sample)
        if live is not None:
            live.session.close()
        if following is not None:
            self._threads.submit(self._run, *following)
