"""The workers of one reward: groups are dealt out, and whatever a worker does, every group gets an outcome."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.process import WorkerError, WorkerKilledError, WorkerProcess

_log = logging.getLogger("rlhfless.rewards")

_KILLS = 2
"""How often in a row a call is tried again after its worker was killed from outside."""
_GRACE = 1.0
"""Seconds that a worker which keeps the time limit itself is given to say so."""


class RewardUnusableError(Exception):
    """The reward cannot be loaded at all; the message says why."""


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to know."""

    name: str
    """The reward's name."""
    kind: str
    """The reward's kind."""
    setup: dict[str, Any]
    """What the kind's scorer is made from."""
    memory: int
    """Memory limit in bytes."""
    load_seconds: float = 300.0
    """Time limit for loading the reward: its file may import heavy libraries."""

    @property
    def verifies(self) -> bool:
        """Whether it is a verifier of ours: then what ends a worker is a response, which is no reason to end a job."""
        return self.kind in ("exact_match", "math", "format", "code")


@dataclass
class Outcome:
    """What became of one group."""

    scores: list[float | None]
    """One per response; all None after an error."""
    error: str | None = None
    """What went wrong: a sentence that starts with the reward's name would go on like this."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Numbers that the reward logged."""
    called: bool = True
    """False where the reward was not called any more, after the error of another group."""


class RewardPool:
    """Persistent workers of one reward.

    Args:
        settings: of each worker.
        size: number of workers; a user's function has one, since it may hold state.
    """

    def __init__(self, settings: WorkerSettings, size: int = 1) -> None:
        self._lanes = [_Lane(settings) for _ in range(size)]

    def start(self) -> None:
        """Begin to start the first worker, so that it loads while the caller does something else."""
        self._lanes[0].start()

    def score(
        self,
        groups: Sequence[RewardGroup],
        *,
        step: int,
        seconds: Callable[[RewardGroup], float],
        give_up: bool,
        stopped: Callable[[], bool],
    ) -> list[Outcome]:
        """Score groups; one outcome each, in their order.

        Args:
            groups: what to score.
            step: training step, for the function's eyes.
            seconds: time limit of a group's call.
            give_up: return at the first error; the groups not reached have an error too.
            stopped: asked several times a second whether to give up altogether.

        Raises:
            RewardUnusableError: if the reward cannot be loaded.
            WorkerStopped: if `stopped` said so.
        """
        width = min(len(self._lanes), len(groups))
        outcomes: list[Outcome | None] = [None] * len(groups)

        def run(lane: int) -> None:
            share = range(lane, len(groups), width)
            scored = self._lanes[lane].score([groups[index] for index in share], step, seconds, give_up, stopped)
            for index, outcome in zip(share, scored, strict=True):
                outcomes[index] = outcome

        if width == 1:
            run(0)
        else:
            with ThreadPoolExecutor(width) as threads:
                list(threads.map(run, range(width)))
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """End all workers."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One worker at a time: a new one whenever the last has ended."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._worker: WorkerProcess | None = None
        self._concurrent = False

    def start(self) -> WorkerProcess:
        if self._worker is not None and not self._worker.alive():
            self.close()
        if self._worker is None:
            self._worker = WorkerProcess(self._settings.name, self._settings.kind, self._settings.memory)
            with contextlib.suppress(WorkerError):  # Found again, and handled, by the first receive.
                self._worker.send(self._settings.setup, self._settings.load_seconds)
        return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def score(
        self,
        groups: list[RewardGroup],
        step: int,
        seconds: Callable[[RewardGroup], float],
        give_up: bool,
        stopped: Callable[[], bool],
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        kills = 0
        together = True
        while len(outcomes) < len(groups):
            pending = [index for index in range(len(groups)) if index not in outcomes]
            answered = len(outcomes)
            try:
                worker = self._ready(stopped)
                # A worker that awaits many calls at once leaves no culprit when it dies: then one by one.
                batch = pending if together or not self._concurrent else pending[:1]
                self._call(worker, groups, batch, step, seconds, outcomes, give_up, stopped)
            except WorkerKilledError as killed:
                self.close()
                kills = 1 if len(outcomes) > answered else kills + 1
                _log.warning("reward %s %s; starting a new worker", self._settings.name, killed)
                if kills > _KILLS:
                    error = f"{killed} {kills} times in a row"
                    self._settle(groups, outcomes, error, step, seconds, stopped)
                    kills = 0
            except WorkerError as error:
                self.close()
                if together and self._concurrent and len(batch) > 1:
                    together = False
                else:
                    self._settle(groups, outcomes, str(error), step, seconds, stopped)
            except BaseException:
                self.close()
                raise
            if give_up and any(outcome.error for outcome in outcomes.values()):
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
        return worker

    def _call(
        self,
        worker: WorkerProcess,
        groups: list[RewardGroup],
        batch: list[int],
        step: int,
        seconds: Callable[[RewardGroup], float],
        outcomes: dict[int, Outcome],
        give_up: bool,
        stopped: Callable[[], bool],
    ) -> None:
        limits = [seconds(groups[index]) for index in batch]
        longest = max(limits)
        worker.send({"groups": [groups[index] for index in batch], "step": step, "seconds": longest}, longest)
        waiting = list(range(len(batch)))
        while waiting:
            limit = longest + _GRACE if self._concurrent else limits[waiting[0]]
            answer = worker.receive(limit, stopped)
            position = answer.get("index")
            if position not in waiting:
                raise WorkerError("wrote to the worker's own socket; a reward must leave unknown descriptors be")
            waiting.remove(position)
            outcome = _outcome(answer, groups[batch[position]])
            outcomes[batch[position]] = outcome
            if outcome.error and give_up:
                if waiting:
                    # Its further answers are not wanted and must not be taken for those of a later call.
                    self.close()
                return

    def _settle(
        self,
        groups: list[RewardGroup],
        outcomes: dict[int, Outcome],
        error: str,
        step: int,
        seconds: Callable[[RewardGroup], float],
        stopped: Callable[[], bool],
    ) -> None:
        """Give the group that the worker has ended with an outcome."""
        index = next(index for index in range(len(groups)) if index not in outcomes)
        group = groups[index]
        if not self._settings.verifies:
            outcomes[index] = _failure(group, error)
        elif group.size > 1:
            _log.warning("reward %s %s; checking the responses one by one", self._settings.name, error)
            outcomes[index] = _joined(
                self.score([group.alone(number)], step, seconds, False, stopped)[0] for number in range(group.size)
            )
        else:
            _log.warning("reward %s %s; the response scores 0", self._settings.name, error)
            outcomes[index] = Outcome([0.0], metrics=[("timed_out", 0.0), ("crashed", 1.0)])


def _failure(group: RewardGroup, error: str, *, called: bool = True) -> Outcome:
    return Outcome([None] * group.size, error, called=called)


def _joined(parts: Iterable[Outcome]) -> Outcome:
    """The outcome of a group whose responses were scored one by one."""
    outcomes = list(parts)
    error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    scores = [None if error is not None else outcome.scores[0] for outcome in outcomes]
    return Outcome(scores, error, [metric for outcome in outcomes for metric in outcome.metrics])


def _outcome(answer: dict[str, Any], group: RewardGroup) -> Outcome:
    """An answer checked: the worker is not trusted to have done so."""
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
            return f"returned {score} as a reward, which is no finite number (None means unscorable)"
    return None
