"""The preparation stage: complete groups are prepared while the tail still decodes."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from rlhfless_functions import artifacts
from rlhfless_functions.api import PrepareRequest, PrepareResult
from rlhfless_operator.planner.step.chunks import chunk_size
from rlhfless_operator.platforms.base import Platform
from rlhfless_operator.training.actors.generated import CompleteGroup
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.instances.instance_queue import Part
from rlhfless_operator.training.requests.tasks import run_to_end

_CHUNK = "chunk-"
"""Beginning of the chunks' names."""


def results_before(folder: str) -> list[PrepareResult]:
    """Return the chunks that earlier drivers of this step had prepared."""
    return [PrepareResult.model_validate(artifacts.read_json(uri)) for uri in _result_uris(folder)]


def prepared_before(folder: str) -> PreparationOutcome:
    """Return the outcome of all chunks that earlier drivers had prepared."""
    outcome = PreparationOutcome()
    for result in results_before(folder):
        outcome.add(result)
    return outcome


def forget_prepared(folder: str) -> None:
    """Have all groups prepared again by the next driver. Their parts stay, since steps may have learnt from some."""
    for uri in _result_uris(folder):
        artifacts.remove(uri)


def _result_uris(folder: str) -> list[str]:
    files = artifacts.list_files(folder)
    return [uri for uri in files if uri.rsplit("/", 1)[-1].startswith(_CHUNK) and uri.endswith(".json")]


async def prepare(
    platform: Platform,
    groups: AsyncIterator[CompleteGroup | None],
    expected: int,
    make_request: Callable[[str, Sequence[CompleteGroup], int], PrepareRequest],
    outcome: PreparationOutcome,
    *,
    instances: Part,
    driver: int,
    retries: int,
    on_prepared: Callable[[PrepareResult], Awaitable[None]] | None = None,
    followed: bool = False,
) -> None:
    """Prepare groups in chunks as they come, until there are no more.

    Args:
        groups: complete groups, as generation yields them; those in `outcome` already are passed over. None says that
            no others are being generated, and more may come once these are prepared.
        expected: number of groups to come, which sets the size of a chunk.
        make_request: (part, groups, attempt) → request.
        outcome: filled in along the way; holds what an earlier driver had prepared.
        instances: of preparation; each prepares one chunk at a time.
        on_prepared: called with every chunk, one after the other, if a learner takes groups as they come. Chunks then
            become smaller, at least a sixth of the groups that are left, because few should wait for others at the end.
        followed: whether such a learner would idle while a large chunk is prepared. Then no chunk is larger than that.
            Where stages take turns it sleeps, and each chunk may have to load its models again.

    Raises:
        StageFailedError: a chunk can't be prepared, or generation failed.
    """
    chunks = _Chunks(expected, instances.actors, outcome, shrink=on_prepared is not None, followed=followed)
    # A step comes here once a round, and a name that repeats would have an earlier chunk's result for answer.
    numbers = itertools.count(len(outcome.chunks))
    telling = asyncio.Lock()

    async def work() -> None:
        while (chunk := await chunks.next()) is not None:
            part = f"{_CHUNK}{driver}-{next(numbers):04d}"
            await instances.turn()
            began = time.monotonic()
            try:
                result = await run_to_end(platform, partial(make_request, part, chunk), retries=retries)
            finally:
                instances.give()
            prepared = PrepareResult.model_validate(result)
            outcome.seconds += max(0.0, time.monotonic() - began - prepared.load_seconds)
            if prepared.load_seconds:
                outcome.loads.append(prepared.load_seconds)
            outcome.add(prepared)
            if on_prepared is not None:
                async with telling:
                    await on_prepared(prepared)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(chunks.collect(groups))
            for _ in range(instances.actors):
                tasks.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors


class _Chunks:
    """The groups of a step, cut into chunks as they come.

    Args:
        expected: number of groups to come, which sets the size of a chunk.
        at_once: chunks that are prepared at a time.
        outcome: groups that are in it are passed over.
        shrink: whether chunks become smaller towards the end.
        followed: see `prepare`.
    """

    def __init__(
        self, expected: int, at_once: int, outcome: PreparationOutcome, *, shrink: bool, followed: bool
    ) -> None:
        self._followed = followed
        self._expected, self._at_once, self._outcome, self._shrink = expected, at_once, outcome, shrink
        self._waiting: list[CompleteGroup] = []
        self._arrived = asyncio.Event()
        self._ended = False
        self._pauses = False
        """Whether no other group is being generated."""

    async def collect(self, groups: AsyncIterator[CompleteGroup | None]) -> None:
        """Take in groups until there are no more."""
        try:
            async for group in groups:
                self._pauses = group is None
                if group is not None and group.prompt not in self._outcome.groups:
                    self._waiting.append(group)
                self._arrived.set()
        finally:
            self._ended = True
            self._arrived.set()

    async def next(self) -> list[CompleteGroup] | None:
        """Wait for enough groups for a chunk, and return them; None once there are no more."""
        while not self._ended or self._waiting:
            left = self._expected - len(self._outcome.groups) if self._shrink else self._expected
            ended = self._ended or self._pauses
            size = chunk_size(len(self._waiting), left, self._at_once, ended=ended, followed=self._followed)
            if size:
                # A chunk's content depends on timing, but what is computed for a group must not: the function passes
                # each group through the models by itself.
                chunk = sorted(self._waiting[:size], key=lambda group: group.prompt)
                del self._waiting[:size]
                return chunk
            self._arrived.clear()
            await self._arrived.wait()
        return None
