"""The number of instances that a job holds: ready when their work comes, and kept no longer than that pays."""

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlhfless_functions.api import STAGES, Preload, Stage
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.pools.whole_gpus import SwitchCost
from rlhfless_operator.planner.warming import keep_alive, kept_for
from rlhfless_operator.platforms.base import Platform


@dataclass
class _Held:
    """The wanted instances of one stage."""

    working: int = 0
    warmed: int = 0
    """Instances that are wanted before their work comes."""
    kept_until: list[float] = field(default_factory=list)
    """Time until which each instance without work is kept."""
    idle_since: list[float] = field(default_factory=list)
    """Times at which instances ran out of work, the oldest first."""
    preload: Preload | None = None
    next_use: float | None = None
    """Time at which its next work is expected; None if nothing is known of it."""
    waking: asyncio.Task[None] | None = None
    releasing: asyncio.Task[None] | None = None

    def wanted(self, now: float) -> int:
        self.forget_past(now)
        return max(self.working + len(self.kept_until), self.warmed)

    def forget_past(self, now: float) -> None:
        self.kept_until = [until for until in self.kept_until if until > now]


class Capacity:
    """Asks a platform for instances on behalf of the training loop.

    Args:
        platform: runs the instances. It keeps instances without work itself if a keep-alive is given.
        keep_alive: of each stage in seconds; None leaves it to the break-even between waiting and starting again.
        history: of earlier steps; added to.
        clock: monotonic seconds.
        shared: GPUs that the stages use in turns: an idle instance gives them to others, and costs nothing to keep.
            None if instances have GPUs of their own.
        whole: GPUs that an instance holds until it ends; None if they are not counted.
        draining_seconds: charged to an instance from its release until it is gone, before one of its stage was seen to
            go.
    """

    def __init__(
        self,
        platform: Platform,
        keep_alive: Mapping[Stage, float | None],
        history: History,
        clock: Callable[[], float] = time.monotonic,
        *,
        shared: SharedGpus | None = None,
        whole: SharedGpus | None = None,
        draining_seconds: float = 0.0,
    ) -> None:
        self._platform = platform
        self._keep_alive = keep_alive
        self.history = history
        self._clock = clock
        self._room = shared or whole
        self._sleeps = shared is not None
        self._draining_seconds = draining_seconds
        self._stages = {stage: _Held() for stage in STAGES}
        self._restart_seconds: dict[Stage, float] = {}
        self._over: set[Stage] = set()
        self._staying: dict[Stage, int] = {}

    @property
    def sleeps(self) -> bool:
        """Whether idle instances sleep, and cost nothing to keep."""
        return self._sleeps

    def has_room(self, stage: Stage) -> bool:
        """Return whether one more instance of a stage has GPUs beside those at work."""
        working = {each: held.working for each, held in self._stages.items()}
        return self._room is None or self._room.has_room(stage, working)

    def switch_cost(self, stage: Stage) -> SwitchCost:
        """Return the cost of letting an instance of a stage go and having one again, as far as it is known."""
        gaps = self.history.recent(f"gap/{stage}")
        # A wait for other jobs is a gap as well, and a rare one: the median ignores it.
        gap = statistics.median(gaps) if gaps else None
        return SwitchCost(self._switch_seconds(stage), gap, over=stage in self._over)

    async def use(
        self,
        stage: Stage,
        count: int,
        preload: Preload | None = None,
        *,
        restart_seconds: float = 0.0,
        undecided: bool = False,
    ) -> None:
        """Have so many instances of a stage at work from now on.

        Args:
            preload: what a fresh one loads before it is ready; unchanged if left out.
            restart_seconds: time that a fresh instance takes to repeat lost work, besides starting.
            undecided: whether those without work are kept until `expect` or `let_go` decides.
        """
        held, now = self._stages[stage], self._clock()
        self._over.discard(stage)
        held.preload = preload or held.preload
        if count > held.working:
            self._resume(stage, held, count - held.working, now)
        elif count < held.working:
            self._restart_seconds[stage] = restart_seconds
            limit, ended = self._limit(stage, now, undecided=undecided), held.working - count
            # Those that are kept for a time only may be gone before the step ends.
            kept = held.kept_until.count(math.inf)
            stay = min(ended, max(0, self._staying.get(stage, 0) - count - kept))
            held.idle_since += [now] * ended
            held.kept_until += [math.inf] * stay + [now + limit] * (ended - stay)
        held.working = count
        await self._apply(stage)
        self._release_in_time(stage, held)

    async def give_up(self, stage: Stage, count: int) -> None:
        """Want so many instances fewer, and keep none of them: they are lost, or never came."""
        self._stages[stage].working -= count
        await self._apply(stage)

    def holds(self, stage: Stage) -> bool:
        """Return whether an instance of a stage is wanted now, with work or without."""
        return self.there(stage) > 0

    def has_idle(self, stage: Stage) -> bool:
        """Return whether an instance of a stage is kept that has no work, and that may be let go."""
        held = self._stages[stage]
        held.forget_past(self._clock())
        return bool(held.kept_until) and not held.working and not self.keeps(stage)

    def keeps(self, stage: Stage) -> bool:
        """Return whether forecasts end no idle instances: the plan or the platform keeps them, or they sleep."""
        return self._sleeps or self._keep_alive[stage] is not None or stage in self._staying

    @property
    def stays(self) -> bool:
        """Whether the plan keeps instances for the whole step."""
        return bool(self._staying)

    def there(self, stage: Stage) -> int:
        """Return the number of instances of a stage that are wanted now, with work or without."""
        return self._stages[stage].wanted(self._clock())

    async def stay(self, counts: Mapping[Stage, int]) -> None:
        """Keep so many instances of these stages from now on once they are there, with work or without. Forecasts
        decide on those of other stages again."""
        ends, self._staying = self._staying.keys() - counts.keys(), dict(counts)
        now = self._clock()
        for stage, held in self._stages.items():
            held.forget_past(now)
            if stage in counts:
                most = max(0, counts[stage] - held.working)
                held.kept_until = [math.inf] * min(most, len(held.kept_until))
            elif stage in ends and stage != "learning":
                # Whoever saves a learner's state lets it go.
                limit = self._limit(stage, now, undecided=False)
                held.kept_until = [now + limit] * len(held.kept_until) if limit else []
            else:
                continue
            await self._apply(stage)
            self._release_in_time(stage, held)

    def switch_seconds(self, stage: Stage) -> float:
        """Return the instance-seconds of letting an instance go and having one again."""
        return self._switch_seconds(stage)

    async def next_use(self, stage: Stage, within: float) -> None:
        """Note in how many seconds a stage has its next work. Instances without work are let go at once if one that is
        started then is cheaper."""
        held, now = self._stages[stage], self._clock()
        held.next_use = now + within
        if held.kept_until and not self.keeps(stage):
            limit = kept_for(within, self._switch_seconds(stage))
            held.kept_until = [now + limit] * len(held.kept_until) if limit else []
            await self._apply(stage)
            self._release_in_time(stage, held)

    async def expect(self, stage: Stage, count: int, preload: Preload | None, *, within: float) -> None:
        """Have so many instances ready in some seconds, when their work is expected. A later call corrects it.

        Nothing happens if so many work already.

        Args:
            preload: loaded before an instance is ready.
            within: seconds until the work is expected.
        """
        held = self._stages[stage]
        if held.working >= count:
            return
        self._stop_waking(held)
        await self.next_use(stage, within)
        wake_after = within - self.startup_seconds(stage)
        if held.warmed and wake_after > self._switch_seconds(stage):
            held.warmed = 0
            await self._apply(stage)

        async def wake_up() -> None:
            await asyncio.sleep(max(0.0, wake_after))
            if held.warmed != count:
                held.warmed, held.preload = count, preload
                await self._apply(stage)

        held.waking = asyncio.create_task(wake_up())
        # A failure will occur again, and be reported, when the work has come.
        held.waking.add_done_callback(lambda task: task.cancelled() or task.exception())

    def startup_seconds(self, stage: Stage) -> float:
        """Return the seconds from asking for an instance until it is ready; those of generation if unknown."""
        return self.history.mean(f"startup/{stage}", self.history.mean("startup/generation"))

    async def let_go(self, stage: Stage) -> None:
        """Let the instances go that have no work."""
        self._stages[stage].kept_until.clear()
        await self._apply(stage)

    async def finish(self, stage: Stage) -> None:
        """Let a stage's instances go now: it has no more work."""
        held = self._stages[stage]
        self._over.add(stage)
        self._stop_waking(held)
        held.warmed = 0
        held.kept_until.clear()
        await self._apply(stage)

    async def close(self) -> None:
        """Stop warming and keeping instances. Instances with work stay."""
        tasks = []
        for held in self._stages.values():
            tasks += [task for task in (held.waking, held.releasing) if task is not None]
            held.waking = held.releasing = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _resume(self, stage: Stage, held: _Held, count: int, now: float) -> None:
        self._stop_waking(held)
        held.warmed = 0
        held.next_use = None
        # The instances that stopped last would have been kept the shortest.
        for since in held.idle_since[-count:]:
            self.history.add(f"gap/{stage}", now - since)
        del held.idle_since[-count if held.working else 0 :]
        del held.kept_until[max(0, len(held.kept_until) - count) :]

    def _limit(self, stage: Stage, now: float, *, undecided: bool) -> float:
        if self._keep_alive[stage] is not None:
            # The platform keeps them.
            return 0.0
        if self._sleeps or undecided:
            return math.inf
        next_use = self._stages[stage].next_use
        if next_use is not None and next_use > now:
            return kept_for(next_use - now, self._switch_seconds(stage))
        return keep_alive(self.history.recent(f"gap/{stage}"), self._switch_seconds(stage))

    def _switch_seconds(self, stage: Stage) -> float:
        draining = self.history.mean(f"draining/{stage}", self._draining_seconds)
        return draining + self.history.mean(f"startup/{stage}") + self._restart_seconds.get(stage, 0.0)

    async def _apply(self, stage: Stage) -> None:
        held = self._stages[stage]
        await self._platform.hold(stage, held.wanted(self._clock()), held.preload)

    def _release_in_time(self, stage: Stage, held: _Held) -> None:
        if held.releasing is not None:
            held.releasing.cancel()
        held.releasing = asyncio.create_task(self._release(stage, held)) if held.kept_until else None

    async def _release(self, stage: Stage, held: _Held) -> None:
        while held.kept_until:
            if (until := min(held.kept_until)) == math.inf:
                return
            await asyncio.sleep(max(0.0, until - self._clock()))
            await self._apply(stage)

    @staticmethod
    def _stop_waking(held: _Held) -> None:
        if held.waking is not None:
            held.waking.cancel()
            held.waking = None
