"""The other asynchronous systems in discrete events: groups stream from a fixed part of the GPUs to the rest."""

import heapq
import math
from collections import deque
from collections.abc import Iterator

from rlhfless_operator.planner.moves.migration import Actor, Unfinished
from rlhfless_operator.planner.moves.rules import Repack
from rlhfless_operator.simulator.asynchronous.systems import Split, Streaming
from rlhfless_operator.simulator.asynchronous.work import Group, Outcome, Step
from rlhfless_operator.simulator.instance import Instance
from rlhfless_operator.simulator.scenarios import Scenario


def run_streaming(
    scenario: Scenario, system: Streaming, split: Split, batches: Iterator[list[Group]], steps: int
) -> Outcome:
    """Run until the learner has taken `steps` steps.

    Args:
        batches: groups in the order in which they begin, without end.
    """
    return _Run(scenario, system, split, batches).until(steps)


class _Run:
    def __init__(self, scenario: Scenario, system: Streaming, split: Split, batches: Iterator[list[Group]]) -> None:
        profile = scenario.profile()
        self._scenario, self._system, self._split = scenario, system, split
        self._batch = scenario.prompts_per_step
        self._drawn = (group for batch in batches for group in batch)
        self._load_seconds = profile.weight_load_seconds
        self._kv_tokens = profile.kv_tokens
        self._instances = [
            Instance(
                str(number), profile.latency, self._load_seconds, max_batch=split.sequences, kv_tokens=profile.kv_tokens
            )
            for number in range(split.instances)
        ]
        self._held = [0] * split.instances
        """Number of responses of each instance."""
        self._weights = [0] * split.instances
        """Version that each instance has, or loads."""
        self._peaks = [0] * split.instances
        """Largest context of each instance since it was empty."""
        self._relayed = 0
        """Version that instances can load beside the learner."""
        self._events: list[tuple[float, int, str, int]] = []
        self._number = 0
        self._current = [0] * split.instances
        """Number of each instance's valid event; events that it announced before are void."""
        self._groups: dict[int, tuple[Group, int]] = {}
        """Incomplete groups by number, with the versions that began them."""
        self._left: dict[int, int] = {}
        """Number of responses of each of these that have not ended."""
        self._complete: deque[tuple[Group, int]] = deque()
        self._begun = 0
        self._draining = False
        self._learning = False
        self._taken: list[tuple[Group, int]] = []
        """Groups of the learner's present step."""
        self._pieces_done = 0
        self._learner_busy = 0.0
        self._steps: list[Step] = []

    def until(self, steps: int) -> Outcome:
        if self._system.repack_seconds is not None:
            self._announce(self._system.repack_seconds, "repack")
        now = 0.0
        while len(self._steps) < steps:
            self._feed(now)
            self._begin(now)
            now, number, kind, which = heapq.heappop(self._events)
            if kind == "ends" and self._current[which] == number:
                self._follow(which, now)
                self._expect(which)
            elif kind == "learnt":
                self._learnt(now)
            elif kind == "loaded":
                self._learning = False
            elif kind == "relayed":
                self._relayed = which
            elif kind == "repack":
                self._repack(now)
            if self._draining and not any(self._held) and not self._in_batch():
                self._load(now)
        for which in range(len(self._instances)):
            self._follow(which, now)
        gpus = self._scenario.gpus_per_instance
        return Outcome(
            tuple(self._steps),
            generation_busy=sum(instance.busy for instance in self._instances) * gpus,
            generation_held=len(self._instances) * gpus * now,
            learner_busy=self._learner_busy,
            learner_held=self._split.learner_gpus * now,
        )

    # --- generation ---

    def _begin(self, now: float) -> None:
        """Begin as many groups as the system and the instances have room for."""
        if self._draining and not self._in_batch():
            return
        if self._system.new_weights == "finish":
            self._begin_on_empty(now)
            return
        touched = set()
        while self._admits():
            which = min(range(len(self._instances)), key=self._held.__getitem__)
            if self._held[which] and self._held[which] + self._scenario.samples_per_prompt > self._split.sequences:
                break
            self._add(which, now)
            touched.add(which)
        for which in touched:
            self._expect(which)

    def _begin_on_empty(self, now: float) -> None:
        """Let each instance without responses load the newest weights and take its even part of a batch."""
        room = max(1, self._split.sequences // self._scenario.samples_per_prompt)
        share = min(room, math.ceil(self._batch / len(self._instances)))
        for which, instance in enumerate(self._instances):
            if self._held[which] or not self._admits():
                continue
            self._follow(which, now)
            if self._weights[which] < self._relayed:
                self._weights[which] = self._relayed
                # It loads them from its host's memory.
                instance.now = now + self._scenario.startup_seconds
            for _ in range(share):
                self._add(which, now)
            self._expect(which)

    def _admits(self) -> bool:
        """Return whether one more group may begin now."""
        if self._in_batch():
            return True
        if self._system.whole_batches and self._groups:
            return False
        if self._system.ahead is None:
            return len(self._complete) < self._batch
        begun = self._begun + (self._batch if self._system.whole_batches else 1)
        return begun <= (len(self._steps) + 1 + self._system.ahead) * self._batch

    def _in_batch(self) -> bool:
        """Return whether a batch that begins as a whole has groups that wait for room."""
        return self._system.whole_batches and self._begun % self._batch > 0

    def _add(self, which: int, now: float) -> None:
        group = next(self._drawn)
        self._follow(which, now)
        self._instances[which].add(group.responses())
        self._held[which] += len(group.lengths)
        self._groups[group.number] = group, self._weights[which]
        self._left[group.number] = len(group.lengths)
        self._begun += 1

    def _follow(self, which: int, now: float) -> None:
        for _, (number, _) in self._instances[which].advance(now):
            self._held[which] -= 1
            self._left[number] -= 1
            if not self._left[number]:
                del self._left[number]
                self._complete.append(self._groups.pop(number))
        if not self._held[which]:
            self._peaks[which] = 0

    def _expect(self, which: int) -> None:
        end = self._instances[which].next_end()
        if end < math.inf:
            self._current[which] = self._announce(end, "ends", which)

    def _announce(self, at: float, kind: str, which: int = 0) -> int:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, kind, which))
        return self._number

    def _repack(self, now: float) -> None:
        """Gather the responses left of each version on fewer instances."""
        assert self._system.repack_seconds is not None
        by_version: dict[int, list[Actor]] = {}
        for which, instance in enumerate(self._instances):
            self._follow(which, now)
            if not self._held[which]:
                continue
            samples = {
                key: Unfinished(self._groups[key[0]][0].prompt_tokens, tokens)
                for key, tokens in instance.tokens().items()
            }
            actor = Actor(instance.name, samples, peak_context=self._peaks[which])
            # The load of an instance with waiting responses does not fall.
            if len(samples) == self._held[which]:
                by_version.setdefault(self._weights[which], []).append(actor)
            self._peaks[which] = max(self._peaks[which], actor.context)
        for actors in by_version.values():
            for move in Repack(self._split.sequences, self._kv_tokens, last=-math.inf).decide(actors, now):
                source, target = int(move.source), int(move.destination or 0)
                self._instances[target].add(self._instances[source].remove(set(move.samples)))
                self._held[target] += len(move.samples)
                self._held[source] -= len(move.samples)
                self._current[source] = 0
        for which in range(len(self._instances)):
            self._expect(which)
        self._announce(now + self._system.repack_seconds, "repack")

    # --- learning ---

    def _feed(self, now: float) -> None:
        """Let the learner take the next piece if it is free and the groups are there."""
        done, pieces = self._pieces_done, self._system.pieces
        size = self._batch * (done + 1) // pieces - self._batch * done // pieces
        if self._learning or len(self._complete) < size:
            return
        if self._system.oldest_first:
            self._complete = deque(sorted(self._complete, key=lambda each: each[1]))
        piece = [self._complete.popleft() for _ in range(size)]
        self._taken += piece
        tokens = sum(group.tokens for group, _ in piece)
        scenario = self._scenario
        work = scenario.preparation_gpu_seconds(tokens) + scenario.learning_gpu_seconds(tokens)
        seconds = work / self._split.learner_gpus
        if done + 1 == pieces:
            seconds += scenario.update_seconds
        self._learning = True
        self._learner_busy += seconds * self._split.learner_gpus
        self._announce(now + seconds, "learnt")

    def _learnt(self, now: float) -> None:
        self._pieces_done += 1
        if self._pieces_done < self._system.pieces:
            self._learning = False
            return
        self._pieces_done = 0
        groups, versions = zip(*self._taken, strict=True)
        self._taken = []
        self._steps.append(Step(now, groups, versions))
        if self._system.new_weights == "finish":
            self._learning = False
            self._announce(now + self._load_seconds, "relayed", len(self._steps))
        elif self._system.new_weights == "drain":
            self._draining = True
        else:
            self._load(now)

    def _load(self, now: float) -> None:
        """Let all instances stop and load the newest weights; the learner waits for them."""
        self._draining = False
        for which, instance in enumerate(self._instances):
            self._follow(which, now)
            instance.pause(0.0, recompute=self._system.recomputes)
            instance.now = now + self._load_seconds
            self._weights[which] = len(self._steps)
            self._expect(which)
        self._announce(now + self._load_seconds, "loaded")
