"""One emulated generation instance: a continuous batch under the linear latency model, exact between events."""

import heapq
import math
from collections import deque
from dataclasses import dataclass

from rlhfless_operator.planner.latency.linear import Latency, LinearLatency
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.simulator.episode import Episode


@dataclass(slots=True)
class Response:
    """A response and its progress. The simulator knows its length, the planner does not."""

    prompt: int
    index: int
    prompt_tokens: int
    length: int
    tokens: float = 0.0
    """Response tokens that it had when it last entered or left an instance."""
    episode: Episode | None = None
    """Its episode, if it acts in an environment."""

    @property
    def key(self) -> Key:
        """(prompt, index)"""
        return self.prompt, self.index

    @property
    def context(self) -> float:
        """Tokens of its context."""
        return self.prompt_tokens + self.tokens + (self.episode.given if self.episode is not None else 0)

    @property
    def turn_end(self) -> int:
        """Response tokens at which it leaves the batch: at its end, or at that of its turn."""
        return self.length if self.episode is None else self.episode.turn_end


@dataclass(frozen=True)
class LettingGo:
    """The terms on which an instance is let go while all of its responses are with their environments."""

    patience_seconds: float
    """Seconds for which it waits before."""
    start_seconds: float
    """Seconds in which another one starts, once an environment has answered."""


class Instance:
    """A running generation instance.

    Decode steps are batched over all running responses. A response that ends makes room for a waiting one, and the
    prefill of that one delays the others. A prompt that the instance has computed is not computed again. Steps are
    rounds: each sequence gains a token in a round. With drafts, the number drafted until the next event is the best one
    at this event.

    Args:
        now: moment at which it is ready.
        letting_go: None if it is kept while its responses are with their environments.
    """

    def __init__(
        self,
        name: str,
        latency: Latency,
        now: float,
        *,
        max_batch: int,
        kv_tokens: int,
        letting_go: LettingGo | None = None,
    ) -> None:
        self.name = name
        self.now = now
        """Moment up to which the instance has run."""
        self.busy = 0.0
        """Seconds of prefill and decode so far."""
        self.let_go = 0.0
        """Seconds for which it was let go so far."""
        self._letting_go = letting_go
        self._away: dict[Key, Response] = {}
        """Responses that are with their environments."""
        self._answers: list[tuple[float, Key]] = []
        self._idle_since = now
        self._latency = latency
        self._max_batch = max_batch
        self._kv_tokens = kv_tokens
        self._waiting: deque[Response] = deque()
        self._running: dict[Key, tuple[Response, float]] = {}
        self._ends: list[tuple[float, Key]] = []
        self._steps = 0.0
        self._context = 0.0
        self._prompts: set[int] = set()
        self._stall = 0.0

    @property
    def empty(self) -> bool:
        """Whether it has no responses."""
        return not self._running and not self._waiting and not self._away

    def keys(self) -> list[Key]:
        """Return the responses that it holds, running or not."""
        return [*self._running, *(response.key for response in self._waiting), *self._away]

    def tokens(self) -> dict[Key, int]:
        """Return the tokens so far of each running response."""
        return {key: int(r.tokens + self._steps - begun) for key, (r, begun) in self._running.items()}

    def add(self, responses: list[Response]) -> None:
        """Add responses behind those that wait."""
        for response in responses:
            if response.episode is not None and response.episode.awaits:
                self._ask(response)
            else:
                self._waiting.append(response)
        self._admit()

    def pause(self, seconds: float, *, recompute: bool = False) -> None:
        """Lose time by a cut and its new request. With `recompute` every running context is computed again."""
        self._stall += seconds
        if recompute:
            self._stall += self._latency.prefill_token_seconds * self._context

    def remove(self, keys: set[Key]) -> list[Response]:
        """Remove responses, and return them with the tokens that they have."""
        taken = [self._leave(key) for key in sorted(keys & self._running.keys())]
        for response in [each for each in self._waiting if each.key in keys]:
            self._waiting.remove(response)
            taken.append(response)
        taken += [self._away.pop(key) for key in sorted(keys & self._away.keys())]
        self._answers = sorted(each for each in self._answers if each[1] in self._away)
        self._ends = [(end, key) for end, key in self._ends if key in self._running]
        heapq.heapify(self._ends)
        self._admit()
        return taken

    def next_end(self) -> float:
        """Return the moment at which the next response, or its turn, ends, or its environment answers, if nothing else
        happens."""
        return min(self._next_turn_end(), self._answers[0][0] if self._answers else math.inf)

    def _next_turn_end(self) -> float:
        if not self._ends:
            return math.inf
        return self.now + self._stall + self._seconds(self._ends[0][0] - self._steps)

    def advance(self, until: float) -> list[tuple[float, Key]]:
        """Run up to a moment, and return (moment, key) of the responses that have ended by then, in order."""
        ended: list[tuple[float, Key]] = []
        while (end := self.next_end()) <= until + 1e-9:
            if end == self._next_turn_end():
                self.busy += end - self.now
                self.now, self._stall = end, 0.0
                self._go(self._ends[0][0] - self._steps)
            else:
                self._run_until(end)
            while self._ends and self._ends[0][0] <= self._steps + 1e-9:
                _, key = heapq.heappop(self._ends)
                response = self._leave(key)
                if response.episode is None:
                    ended.append((end, key))
                else:
                    response.episode.kept_by = self.name
                    self._ask(response)
            ended += [(end, key) for key in self._answered(end)]
            self._admit()
        self._run_until(until)
        return ended

    def _run_until(self, moment: float) -> None:
        if moment <= self.now:
            return
        if self._running:
            available = moment - self.now
            self.busy += available
            decoding = max(0.0, available - self._stall)
            self._stall = max(0.0, self._stall - available)
            self._go(self._steps_in(decoding))
        self.now = moment

    def _ask(self, response: Response) -> None:
        assert response.episode is not None
        self._away[response.key] = response
        heapq.heappush(self._answers, (response.episode.ask(self.now), response.key))
        if not self._running and not self._waiting:
            self._idle_since = self.now

    def _answered(self, now: float) -> list[Key]:
        """Take back responses whose environments have answered; return those whose episodes are over."""
        over = []
        while self._answers and self._answers[0][0] <= now:
            self._come_back(now)
            _, key = heapq.heappop(self._answers)
            response = self._away.pop(key)
            assert response.episode is not None
            response.episode.answer()
            if response.episode.is_over:
                over.append(key)
            else:
                self._waiting.append(response)
        return over

    def _come_back(self, now: float) -> None:
        """Start again if it was let go, which has cost all keys and values."""
        terms = self._letting_go
        if terms is None or self._running or self._waiting or now - self._idle_since <= terms.patience_seconds:
            return
        self.let_go += now - self._idle_since - terms.patience_seconds
        self._idle_since = now
        self._stall = terms.start_seconds
        self._prompts.clear()
        for response in self._away.values():
            assert response.episode is not None
            response.episode.kept_by = ""

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            response = self._waiting[0]
            context, episode = response.context, response.episode
            if self._running and self._context + context > self._kv_tokens:
                return
            self._waiting.popleft()
            known: float = response.prompt_tokens if response.prompt in self._prompts else 0
            if episode is not None and episode.kept_by == self.name:
                known = context - episode.given_last
            self._stall += self._latency.prefill_token_seconds * (context - known)
            self._prompts.add(response.prompt)
            self._running[response.key] = (response, self._steps)
            self._context += context
            heapq.heappush(self._ends, (self._steps + response.turn_end - response.tokens, response.key))

    def _leave(self, key: Key) -> Response:
        response, begun = self._running.pop(key)
        response.tokens += self._steps - begun
        self._context -= response.context
        return response

    def _go(self, steps: float) -> None:
        self._steps += steps
        self._context += steps * len(self._running)

    def _seconds(self, steps: float) -> float:
        latency, batch = self._line(), len(self._running)
        return steps * (
            latency.step_seconds
            + batch * latency.sequence_seconds
            + latency.context_seconds * (self._context + batch * steps / 2)
        )

    def _line(self) -> LinearLatency:
        batch = len(self._running)
        return self._latency.at(batch, self._context / max(1, batch))

    def _steps_in(self, seconds: float) -> float:
        """Return the inverse of `_seconds`: the positive root of a quadratic."""
        latency, batch = self._line(), len(self._running)
        linear = latency.step_seconds + batch * latency.sequence_seconds + latency.context_seconds * self._context
        quadratic = latency.context_seconds * batch / 2
        return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * quadratic * seconds))
