"""The workers of one reward. The pool deals groups out, and every group gets an outcome even if its worker fails."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rlhfless_functions.rewards.checks import FATES
from rlhfless_functions.rewards.groups import START, Progress, RewardGroup
from rlhfless_functions.rewards.process import VERIFIERS, WorkerError, WorkerKilledError, WorkerProcess

_log = logging.getLogger("rlhfless.rewards")

_KILLS = 2
"""Most consecutive retries of a call after its worker was killed from outside."""
_GRACE = 1.0
"""Extra seconds for a worker that enforces the time limit itself."""


class RewardUnusableError(Exception):
    """The reward can't be loaded; the message says why."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker."""

    name: str
    """The reward's name."""
    kind: str
    """The reward's kind."""
    setup: dict[str, Any]
    """Arguments of the kind's scorer."""
    memory: int
    """Memory limit in bytes."""
    load_seconds: float = 300.0
    """Time limit for loading the reward: its file may import heavy libraries."""

    @property
    def verifies(self) -> bool:
        """Whether it is a built-in verifier. Then a response ended the worker, which is no reason to end the job."""
        return self.kind in VERIFIERS


@dataclass
class Outcome:
    """The outcome of one group."""

    scores: list[float | None]
    """One score per response; all None after an error."""
    error: str | None = None
    """The fault, as the end of a sentence that starts with the reward's name."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Numbers that the reward logged."""
    called: bool = True
    """False if the reward was not called, because another group had failed."""


class RewardPool:
    """Persistent workers of one reward.

    Args:
        settings: settings of each worker.
        size: number of workers; a user's function has one, because it may hold state.
    """

    def __init__(self, settings: WorkerSettings, size: int = 1) -> None:
        self._lanes = [_Lane(settings) for _ in range(size)]

    def start(self) -> None:
        """Start the first worker in the background."""
        self._lanes[0].start()

    def score(
        self,
        groups: Sequence[RewardGroup],
        *,
        progress: Progress = START,
        seconds: Callable[[RewardGroup], float],
        give_up: bool,
        stopped: Callable[[], bool],
    ) -> list[Outcome]:
        """Score groups; one outcome each, in their order.

        Args:
            groups: the groups to score.
            progress: position of the training, which the function can read.
            seconds: time limit of a group's call.
            give_up: return at the first error; the remaining groups get an error too.
            stopped: called several times a second; returns whether to stop.

        Raises:
            RewardUnusableError: the reward can't be loaded.
            WorkerStopped: `stopped` returned True.
        """
        width = min(len(self._lanes), len(groups))
        way = _Way(progress, seconds, give_up, stopped)
        with ThreadPoolExecutor(width) as threads:
            scored = list(threads.map(lambda lane: self._lanes[lane].score(groups[lane::width], way), range(width)))
        return [scored[index % width][index // width] for index in range(len(groups))]

    def close(self) -> None:
        """End all workers."""
        for lane in self._lanes:
            lane.close()


@dataclass(frozen=True)
class _Way:
    """The way to score groups; see `RewardPool.score`."""

    progress: Progress
    seconds: Callable[[RewardGroup], float]
    give_up: bool
    stopped: Callable[[], bool]


class _Lane:
    """One worker at a time; a new one after the last has ended."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._worker: WorkerProcess | None = None
        self._concurrent = False
        self._told = False
        """Whether the log has what the machine lacks."""

    def start(self) -> WorkerProcess:
        if self._worker is not None and not self._worker.alive():
            self.close()
        if self._worker is None:
            self._worker = WorkerProcess(self._settings.name, self._settings.kind, self._settings.memory)
            with contextlib.suppress(WorkerError):  # The first receive raises it again and handles it.
                self._worker.send(self._settings.setup, self._settings.load_seconds)
        return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def score(self, groups: Sequence[RewardGroup], way: _Way) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        kills = 0
        together = True
        while len(outcomes) < len(groups):
            pending = [index for index in range(len(groups)) if index not in outcomes]
            answered = len(outcomes)
            try:
                worker = self._ready(way.stopped)
                # If a worker that awaits many calls dies, the culprit is unknown. Then call one by one.
                batch = pending if together or not self._concurrent else pending[:1]
                self._call(worker, groups, batch, way, outcomes)
            except WorkerKilledError as killed:
                self.close()
                kills = 1 if len(outcomes) > answered else kills + 1
                _log.warning("reward %s %s; starting a new worker", self._settings.name, killed)
                if kills > _KILLS:
                    self._settle(groups, outcomes, WorkerError(f"{killed} {kills} times in a row"), way)
                    kills = 0
            except WorkerError as error:
                self.close()
                if together and self._concurrent and len(batch) > 1:
                    together = False
                else:
                    self._settle(groups, outcomes, error, way)
            except BaseException:
                self.close()
                raise
            if way.give_up and any(outcome.error for outcome in outcomes.values()):
                for index, group in enumerate(groups):
                    outcomes.setdefault(index, _failure(group, "was not called after an earlier error", called=False))
        return [outcomes[index] for index in range(len(groups))]

    def _ready(self, stopped: Callable[[], bool]) -> WorkerProcess:
        worker = self.start()
        if not worker.ready:
            try:
                answer = worker.receive(self._settings.load_seconds, stopped)
            except WorkerKilledError:
                raise
            except WorkerError as error:
                self.close()
                raise RewardUnusableError(f"cannot be loaded: it {error}") from None
            if not answer.get("ready"):
                self.close()
                raise RewardUnusableError(str(answer.get("error")))
            worker.ready = True
            self._concurrent = bool(answer.get("concurrent"))
            for sentence in () if self._told else answer.get("lacking", ()):
                _log.warning("the code that reward %s tests is not fully confined: %s", self._settings.name, sentence)
            self._told = True
        return worker

    def _call(
        self,
        worker: WorkerProcess,
        groups: Sequence[RewardGroup],
        batch: list[int],
        way: _Way,
        outcomes: dict[int, Outcome],
    ) -> None:
        limits = [way.seconds(groups[index]) for index in batch]
        longest = max(limits)
        worker.send(
            {"groups": [groups[index] for index in batch], "progress": way.progress, "seconds": longest}, longest
        )
        waiting = list(range(len(batch)))
        while waiting:
            limit = longest + _GRACE if self._concurrent else limits[waiting[0]]
            answer = worker.receive(limit, way.stopped)
            position = answer.get("index")
            if position not in waiting:
                raise WorkerError(
                    "wrote to the worker's own socket; a reward must not write to descriptors that it did not open"
                )
            waiting.remove(position)
            outcome = _outcome(answer, groups[batch[position]])
            outcomes[batch[position]] = outcome
            if outcome.error and way.give_up:
                if waiting:
                    # Further answers must not be taken for those of a later call.
                    self.close()
                return

    def _settle(
        self, groups: Sequence[RewardGroup], outcomes: dict[int, Outcome], error: WorkerError, way: _Way
    ) -> None:
        """Set the outcome of the group at which the worker ended."""
        index = next(index for index in range(len(groups)) if index not in outcomes)
        group = groups[index]
        if not self._settings.verifies:
            outcomes[index] = _failure(group, str(error))
        elif group.size > 1:
            _log.warning("reward %s %s; checking the responses one by one", self._settings.name, error)
            way = replace(way, give_up=False)
            outcomes[index] = _joined(self.score([group.alone(number)], way)[0] for number in range(group.size))
        else:
            _log.warning("reward %s %s; the response scores 0", self._settings.name, error)
            outcomes[index] = Outcome([0.0], metrics=[(fate, float(fate == error.fate)) for fate in FATES])


def _failure(group: RewardGroup, error: str, *, called: bool = True) -> Outcome:
    return Outcome([None] * group.size, error, called=called)


def _joined(parts: Iterable[Outcome]) -> Outcome:
    """Return the outcome of a group whose responses were scored one by one."""
    outcomes = list(parts)
    error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    scores = [None if error is not None else outcome.scores[0] for outcome in outcomes]
    return Outcome(scores, error, [metric for outcome in outcomes for metric in outcome.metrics])


def _outcome(answer: dict[str, Any], group: RewardGroup) -> Outcome:
    """Check an answer. The worker is not trusted to have done so."""
    metrics = [(str(name), float(value)) for name, value in answer.get("metrics", []) if math.isfinite(value)]
    error, scores = answer.get("error"), answer.get("scores")
    if error is None:
        error = _fault(scores, group.size)
    if error is not None:
        return Outcome([None] * group.size, str(error), metrics)
    return Outcome([None if score is None else float(score) for score in scores or []], None, metrics)


def _fault(scores: object, size: int) -> str | None:
    if not isinstance(scores, list):
        return "answered without scores"
    if len(scores) != size:
        return f"returned {len(scores)} rewards for {size} responses"
    for score in scores:
        if score is not None and not (isinstance(score, int | float) and math.isfinite(score)):
            return f"returned {score} as a reward, which is not a finite number (None means unscorable)"
    return None
