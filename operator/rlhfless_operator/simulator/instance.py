"""One emulated generation instance: a continuous batch under the linear latency model, exact between events."""

import heapq
import math
from collections import deque
from dataclasses import dataclass

from rlhfless_operator.planner.latency.linear import Latency, LinearLatency
from rlhfless_operator.planner.moves.migration import Key


@dataclass(slots=True)
class Response:
    """A response and its progress. The simulator knows its length, the planner does not."""

    prompt: int
    index: int
    prompt_tokens: int
    length: int
    tokens: float = 0.0
    """Response tokens that it had when it last entered or left an instance."""

    @property
    def key(self) -> Key:
        """(prompt, index)"""
        return self.prompt, self.index


class Instance:
    """A running generation instance.

    Decode steps are batched over all running responses. A response that ends makes room for a waiting one, and the
    prefill of that one delays the others. A prompt that the instance has computed is not computed again. Steps are
    rounds: each sequence gains a token in a round. With drafts, the number drafted until the next event is the best one
    at this event.

    Args:
        now: moment at which it is ready.
    """

    def __init__(self, name: str, latency: Latency, now: float, *, max_batch: int, kv_tokens: int) -> None:
        self.name = name
        self.now = now
        """Moment up to which the instance has run."""
        self.busy = 0.0
        """Seconds of prefill and decode so far."""
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
        return not self._running and not self._waiting

    def keys(self) -> list[Key]:
        """Return the responses that it holds, running or not."""
        return [*self._running, *(response.key for response in self._waiting)]

    def tokens(self) -> dict[Key, int]:
        """Return the tokens so far of each running response."""
        return {key: int(r.tokens + self._steps - begun) for key, (r, begun) in self._running.items()}

    def add(self, responses: list[Response]) -> None:
        """Add responses behind those that wait."""
        self._waiting.extend(responses)
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
        self._ends = [(end, key) for end, key in self._ends if key in self._running]
        heapq.heapify(self._ends)
        self._admit()
        return taken

    def next_end(self) -> float:
        """Return the moment at which the next response ends if nothing else happens."""
        if not self._ends:
            return math.inf
        return self.now + self._stall + self._seconds(self._ends[0][0] - self._steps)

    def advance(self, until: float) -> list[tuple[float, Key]]:
        """Run up to a moment, and return (moment, key) of the responses that have ended by then, in order."""
        ended: list[tuple[float, Key]] = []
        while self._ends and (end := self.next_end()) <= until + 1e-9:
            self.busy += end - self.now
            self.now, self._stall = end, 0.0
            self._go(self._ends[0][0] - self._steps)
            while self._ends and self._ends[0][0] <= self._steps + 1e-9:
                _, key = heapq.heappop(self._ends)
                self._leave(key)
                ended.append((end, key))
            self._admit()
        if until > self.now:
            if self._running:
                available = until - self.now
                self.busy += available
                decoding = max(0.0, available - self._stall)
                self._stall = max(0.0, self._stall - available)
                self._go(self._steps_in(decoding))
            self.now = until
        return ended

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            response = self._waiting[0]
            context = response.prompt_tokens + response.tokens
            if self._running and self._context + context > self._kv_tokens:
                return
            self._waiting.popleft()
            known = response.prompt_tokens if response.prompt in self._prompts else 0
            self._stall += self._latency.prefill_token_seconds * (context - known)
            self._prompts.add(response.prompt)
            self._running[response.key] = (response, self._steps)
            self._context += context
            heapq.heappush(self._ends, (self._steps + response.length - response.tokens, response.key))

    def _leave(self, key: Key) -> Response:
        response, begun = self._running.pop(key)
        response.tokens += self._steps - begun
        self._context -= response.prompt_tokens + response.tokens
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
