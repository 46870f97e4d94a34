"""Environments of a rehearsal: they answer with as many tokens, after as much time, as those of a trace.

An episode goes on after any kill.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhfless_functions.api import GenerationRequest
from rlhfless_functions.data.traces import TraceLengths, read_trace_rows
from rlhfless_functions.data.turns import turns_of, wait_of
from rlhfless_functions.environments.episodes import Observation, Outcome, SampleKey, Turn
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings
from rlhfless_functions.settings.emulation import EmulationSettings

_GIVEN_TOKEN = 2
"""The token that environments give."""


def read_lengths(emulation: EmulationSettings) -> TraceLengths:
    """Read the trace of an emulated GPU.

    Raises:
        TaskError: if it can't be read, or has no turns although samples act.
    """
    with store_errors():
        try:
            lengths = TraceLengths(read_trace_rows(emulation.trace), emulation.prompts_per_step)
        except ValueError as error:
            raise TaskError("data_invalid", f"rehearsal.trace: {error}") from error
    if emulation.acts and not lengths.acts:
        raise TaskError(
            "data_invalid",
            f"rehearsal.trace: {emulation.trace} has no turns, but the job has an environment; name the folder of a run"
            " with an environment, or remove spec.environment",
        )
    return lengths


class EmulatedEpisodes:
    """The environments of a share; see `Episodes`.

    Args:
        lengths: the trace.
        time_scale: real seconds for each second of the trace.
        clock: monotonic seconds.
    """

    def __init__(self, lengths: TraceLengths, time_scale: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lengths = lengths
        self._time_scale = time_scale
        self._clock = clock
        self._count = itertools.count()
        self._due: list[tuple[float, int, Observation]] = []
        self._changed = threading.Condition()

    def submit(self, turn: Turn) -> None:
        """Hand a turn over; its answer comes when that of the trace would."""
        response = self._lengths.response(turn.step, *turn.sample)
        spans = turns_of(response)
        answer = self._answer(turn, spans, response.away_seconds * self._time_scale)
        due = self._clock() + wait_of(response) * self._time_scale
        with self._changed:
            heapq.heappush(self._due, (due, next(self._count), answer))
            self._changed.notify()

    def ready(self, wait_seconds: float) -> list[Observation]:
        """Return the answers that are due; see `Episodes`."""
        deadline = self._clock() + wait_seconds
        with self._changed:
            while True:
                now, found = self._clock(), list[Observation]()
                while self._due and self._due[0][0] <= now:
                    found.append(heapq.heappop(self._due)[2])
                if found or now >= deadline:
                    return found
                self._changed.wait(min([deadline, *(due for due, _, _ in self._due[:1])]) - now)

    def forget(self, sample: SampleKey) -> None:
        """Do nothing: an episode has no session."""

    def close(self) -> None:
        """Do nothing: there are no processes."""

    @staticmethod
    def _answer(turn: Turn, spans: list[tuple[int, int]], seconds: float) -> Observation:
        place = len(turn.response)
        following = next((start for start, _ in spans if start >= place), None)
        if following is not None and not turn.truncated and following - place < turn.room:
            return Observation(turn.sample, [_GIVEN_TOKEN] * (following - place))
        ended = "finished" if following is None else "maxTokens"
        turns = sum(end <= place for _, end in spans)
        outcome = Outcome(score=None, turns=turns, ended=ended, seconds_away=round(seconds, 4))
        return Observation(turn.sample, done=True, outcome=outcome)


class EmulatedEpisodeMaker:
    """Makes the emulated environments of requests; reads the trace once.

    Args:
        emulation: names the trace.
    """

    def __init__(self, emulation: EmulationSettings) -> None:
        self._emulation = emulation
        self._lengths: TraceLengths | None = None
        self._reading = threading.Lock()

    def __call__(self, request: GenerationRequest) -> EmulatedEpisodes | None:
        """Return the environments of a request's samples; None if the job has none.

        Raises:
            TaskError: the trace can't be read, or has no turns.
        """
        return self._made() if request.environment is not None else None

    def make(
        self, settings: EnvironmentSettings, model: ModelSettings, template_arguments: Mapping[str, Any], actors: int
    ) -> EmulatedEpisodes:
        """Return the environments of a job's samples.

        Raises:
            TaskError: as above.
        """
        return self._made()

    def _made(self) -> EmulatedEpisodes:
        with self._reading:
            if self._lengths is None:
                self._lengths = read_lengths(self._emulation)
        return EmulatedEpisodes(self._lengths, self._emulation.time_scale)
