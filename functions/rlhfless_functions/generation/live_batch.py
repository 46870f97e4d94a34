"""The batch of a request: shares of one or several steps in one run of the engine, changed by lines of the body.

A request that is not live has one share and no lines. Samples join behind those that wait, and leave at any time.
Other weights are swapped in between two passes: every response goes on with them, as if a new request had continued it.
Responses that keep their weights have left before. The tokens of a sample depend neither on the time at which it joins
nor on the other samples, because its random numbers are those of its own positions.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rlhfless_functions.api import (
    AddSamples,
    Done,
    Event,
    Failed,
    GenerationRequest,
    GenerationResult,
    Join,
    Leave,
    Line,
    NewWeights,
    NextWeights,
    Progress,
    WeightsFetched,
)
from rlhfless_functions.generation.batch_counts import BatchCounts
from rlhfless_functions.generation.engines.base import (
    Engine,
    EngineRun,
    Growth,
    NonFiniteLogitsError,
    SequenceKey,
    SequenceResult,
    SequenceTask,
)
from rlhfless_functions.generation.live_versions import check_goes_on, check_joins
from rlhfless_functions.generation.orders import OpenEpisodes, Orders
from rlhfless_functions.generation.prefetching import WeightsPrefetcher
from rlhfless_functions.generation.reading import Read
from rlhfless_functions.generation.rollout_files import RolloutPublisher
from rlhfless_functions.generation.share import Share, diverged, fetched_bytes, present_weights
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.1
"""Longest wait for a line while the batch is empty."""
PLACES_SHARE = 0.05
"""Least time between two reports that places have become free, as a share of that between two reports of all."""

Load = Callable[[NextWeights, Sequence[NextWeights]], WeightsFetched]
"""Loads weights into the engine, looks for the next ones from then on, and returns the counts of what it fetched."""


class LiveBatch:
    """The work of one request.

    Args:
        request: the request, whose samples are the first share.
        context: has the lines that follow, if it is live.
        engine: without a run.
        load: loads weights.
        prefetcher: fetches the next weights.
        clock: monotonic seconds.
        open_episodes: opens the environments of a share; called in any thread.
    """

    def __init__(
        self,
        request: GenerationRequest,
        context: TaskContext,
        engine: Engine,
        load: Load,
        prefetcher: WeightsPrefetcher,
        clock: Callable[[], float],
        open_episodes: OpenEpisodes = lambda request: None,
    ) -> None:
        self._request = request
        self._context = context
        self._inbox = context.inbox if context.inbox is not None else Inbox(closed=True)
        self._engine = engine
        self._load = load
        self._prefetcher = prefetcher
        self._clock = clock
        live = request.live
        self._growth = Growth(live.sequences, live.prompt_tokens) if live is not None else None
        self._newest = request
        """Request of the share that joined last."""
        self._version = request.weights.version
        self._shares: dict[str, Share] = {}
        self._run: EngineRun | None = None
        self._tasks: dict[SequenceKey, tuple[str, SequenceTask]] = {}
        """Sink and task of every unfinished sample, in the order in which they came."""
        self._orders = Orders(self._emit_of, open_episodes)
        self._counts = BatchCounts()
        self._asked = 0.0
        """Time at which weights were asked for."""
        self._all_wait = False
        """Whether it ends because all samples wait for their environments."""
        self._error: TaskError | None = None
        """Error of a share that ended while the batch went on."""
        self._told_room = self._sampled = False
        self._received = 0
        self._told_places = (0, 0)
        """Running and waiting samples at the last report."""

    def run(self) -> GenerationResult:
        """Decode until no samples are left and none come, or the task is told to stop. A share that is unread is left.

        Raises:
            TaskError: weights can't be had, the model has diverged, or a share that is all of the request fails.
        """
        request, self._asked = self._request, self._clock()
        try:
            self._orders.put(Join(request=request), self._version)
            if self._context.stop_reason is None and not self._ends_at_once():
                self._counts.has_fetched(self._load(present_weights(request), request.next_weights))
            self._decode()
        finally:
            self._prefetcher.pause()
            if self._context.stop_reason == "drain":
                self._prefetcher.stop()
            self._orders.close()
        if self._error is not None and request.live is None:
            raise self._error
        made = self._counts.result(self._run, all_wait=self._all_wait)
        return made.model_copy(update={"unfinished": made.unfinished or (0 if made.finished else len(request.samples))})

    def _ends_at_once(self) -> bool:
        """Return whether earlier attempts have finished all samples, and no others come. Then no weights are needed."""
        reading = self._orders.first.reading
        if not self._request.resume_from or reading is None or reading.exception() or not reading.result().is_finished:
            return False
        self._hear(idle=True)
        return self._context.stop_reason is not None or (self._inbox.is_over and len(self._orders) == 1)

    def _decode(self) -> None:
        told, told_places, settled = (now := self._clock()), now, self._prefetcher.settled
        try:
            while self._context.stop_reason is None:
                self._hear()
                self._obey()
                too_long = [share.waits_too_long() for share in self._shares.values()]
                self._all_wait = not self._orders and bool(too_long) and all(too_long)
                if self._is_over or self._all_wait:
                    break
                idle = self._run is not None and not self._tasks
                before, waits = now, not self._advance()
                now = self._clock()
                self._counts.passed(now - before, waits=waits, idle=idle)
                for share in self._shares.values():
                    share.flush(now)
                if now - told >= self._request.progress_seconds or self._prefetcher.settled != settled:
                    told, told_places, settled = now, now, self._prefetcher.settled
                    self._tell()
                elif now - told_places >= self._request.progress_seconds * PLACES_SHARE and self._places_changed:
                    told_places = now
                    self._tell(lengths=False)
        except NonFiniteLogitsError as error:
            raise diverged(error, self._request.key.step, self._version) from error
        finally:
            # The engine may have failed, but its earlier samples are valid.
            for sink in list(self._shares):
                self._close(sink, told=self._context.stop_reason is None, ends=True)
            if self._run is not None:
                self._run.close()

    @property
    def _places_changed(self) -> bool:
        run = self._run if self._request.live is not None else None
        return run is not None and (run.running, run.waiting) != self._told_places

    @property
    def _is_over(self) -> bool:
        return self._inbox.is_over and not self._orders and not self._tasks

    def _advance(self) -> bool:
        """Make a pass, and give each share what has finished. Return False if all samples were with their
        environments."""
        run = self._run
        if run is None or not self._tasks:
            return True
        computes, results = bool(run.running or run.waiting), defaultdict[str, list[SequenceResult]](list)
        for result in run.step():
            results[self._tasks[result.key][0]].append(result)
        for sink, share in self._shares.items():
            if sink in results or share.acts:
                for key in share.take(results[sink], among=len(self._shares)):
                    del self._tasks[key]
        if not self._sampled:
            self._sampled = True
            seconds = round(self._counts.weights_seconds, 4)
            logger.info("first tokens sampled", extra={"fields": {"weights_seconds": seconds}})
        return computes

    # --- lines ---

    def _hear(self, *, idle: bool = False) -> None:
        """Take in the lines that have come. Wait for one only while nothing is left to compute."""
        for line in self._inbox.take(IDLE_SECONDS if idle or not (self._tasks or self._orders) else 0.0):
            self._orders.put(line, self._version)

    def _obey(self) -> None:
        """Carry out the lines in their order, as far as what they need is read. Wait for it if nothing else is to
        do."""
        while self._orders:
            order = self._orders.first
            if order.reading is not None and not order.reading.done() and self._tasks:
                return
            self._orders.take()
            line = order.line
            if isinstance(line, NewWeights):
                self._swap(line)
            elif isinstance(line, Leave):
                if line.sink in self._shares:
                    self._close(line.sink, told=True)
            elif order.reading is not None:
                self._join(line, order.reading)

    def _join(self, line: Line, reading: Future[Read]) -> None:
        """Let samples join the batch. If that fails, their share leaves it, and no other."""
        sink = line.request.sink if isinstance(line, Join) else line.sink if isinstance(line, AddSamples) else ""
        try:
            check_joins(self._orders.request_of(sink), self._version)
            with store_errors():
                read = reading.result()
                if isinstance(line, Join):
                    tasks = self._open(line.request, read)
                elif (share := self._shares.get(sink)) is not None and isinstance(line, AddSamples):
                    tasks = share.add(line.samples, read.prompts, read.earlier)
                else:
                    return
                self._received += len(line.request.samples if isinstance(line, Join) else line.samples)
                self._admit(sink, tasks, joins=isinstance(line, Join))
        except TaskError as error:
            if sink in self._shares:
                self._close(sink, told=False)
            self._failed(sink, error)

    def _open(self, request: GenerationRequest, read: Read) -> Sequence[SequenceTask]:
        episodes = self._orders.episodes_of(request.sink)
        publisher = RolloutPublisher(request.sink, read.parts, self._emit_of(request.sink))
        share = Share(request, read.prompts, read.earlier, publisher, self._clock, episodes)
        self._shares[request.sink], self._newest = share, request
        return share.tasks

    def _admit(self, sink: str, tasks: Sequence[SequenceTask], *, joins: bool) -> None:
        if not tasks:
            return
        if self._run is None:
            self._start(tasks)
        else:
            for task in tasks:
                self._run.add(task)
        assert self._run is not None
        self._tasks |= {task.key: (sink, task) for task in tasks}
        self._shares[sink].begins(self._run, self._version, tasks)
        if joins or any(task.response_tokens for task in tasks):
            # This part has the samples of all sinks, for a later attempt.
            self._shares[sink].publish(self._clock())
        if not self._told_room:
            self._run.await_weights()
            self._counts.weights_seconds = self._clock() - self._asked
            self._told_room = True
            self._tell(self._counts.fetched, room=True)

    def _start(self, tasks: Sequence[SequenceTask]) -> None:
        request, growth = self._newest, self._growth
        if growth is not None:
            growth = replace(growth, prompts=frozenset(request.draft_prompts))
        self._run = self._engine.start(
            tasks, request.sampling, request.kv_budget_tokens, request.drafts, keep_kv_cache=request.keep_kv_cache,
            growth=growth,
        )  # fmt: skip

    def _failed(self, sink: str, error: TaskError) -> None:
        self._error = error
        if self._request.live is not None:
            self._emit_of(sink)(Failed(reason=error.reason, message=str(error), retryable=error.retryable))

    def _close(self, sink: str, *, told: bool, ends: bool = False) -> None:
        """Take a share out of the batch, and store what there is of it, beside the decoding.

        Args:
            told: whether to say that it is done, once that is stored.
            ends: whether the whole task ends. The engine may then keep what the next one continues.
        """
        share = self._shares.pop(sink)
        share.publish(self._clock())
        if not ends and self._run is not None:
            self._run.remove(share.unfinished)
        for key in share.unfinished:
            self._tasks.pop(key, None)
        result = share.result()
        self._counts.ended(result)
        self._orders.close_episodes(sink)

        def finish() -> None:
            try:
                with store_errors():
                    share.close()
            except TaskError as error:
                self._failed(sink, error)
            else:
                if told and self._request.live is not None:
                    self._emit_of(sink)(Done(result=result.model_dump(mode="json")))

        self._orders.beside(finish)

    def _swap(self, line: NewWeights) -> None:
        """Go on with other weights, and with all responses as they are."""
        run, version = self._run, line.present.weights.version
        if version == self._version:
            return
        check_goes_on(len(self._tasks), self._version, version)
        began = self._clock()
        unfinished = run.unfinished() if run is not None else []
        unfinished += [result for share in self._shares.values() for result in share.away_samples()]
        if run is not None:
            self._counts.closes(run)
            run.close()
        self._prefetcher.pause()
        fetched = self._load(line.present, line.next_weights)
        self._run, self._version = None, version
        for result in unfinished:
            sink, task = self._tasks[result.key]
            task = replace(task, response_tokens=result.response_tokens, log_probs=result.log_probs)
            self._tasks[result.key] = sink, task
        if self._tasks:
            self._start([task for _, task in self._tasks.values()])
            assert self._run is not None
            self._run.await_weights()
        for share in self._shares.values():
            share.goes_on_in(self._run, version, unfinished)
        told = {"version": version, "seconds": round(self._clock() - began, 4), "responses": len(self._tasks)}
        logger.info("other weights swapped in", extra={"fields": told})
        self._counts.has_fetched(fetched)
        self._tell(fetched)

    # --- reports ---

    def _emit_of(self, sink: str) -> Callable[[Event], None]:
        return lambda event: self._context.emit(event.model_copy(update={"of": sink}))

    def _tell(self, fetched: WeightsFetched | None = None, *, room: bool = False, lengths: bool = True) -> None:
        run, shares = self._run, self._shares.values()
        computed, decoding = self._counts.now(run)
        self._told_places = running, waiting = (run.running, run.waiting) if run is not None else (0, 0)
        away = sum(share.away for share in shares)
        progress = Progress(
            finished=self._counts.finished + sum(share.finished for share in shares),
            running=running,
            waiting=waiting + away,
            away=away,
            tokens=computed.response,
            lengths=self._lengths(run) if run is not None and lengths else [],
            decoding=decoding,
            prefetched_version=self._prefetcher.settled,
            version=self._version,
            received=self._received,
            weights_fetched=self._counts.fetched,
        )
        if fetched is not None:
            progress = progress.model_copy(update={"weights_bytes": fetched_bytes(self._request, fetched)})
        self._context.emit(progress.model_copy(update={"room": run.room}) if room and run is not None else progress)

    def _lengths(self, run: EngineRun) -> list[tuple[int, int, int]]:
        """Return the lengths of responses without tokens that environments gave."""
        shares = [share for share in self._shares.values() if share.acts]
        # Two shares have the same sample only in two epochs, and what it was given is then counted twice at most.
        return [
            (prompt, index, max(0, tokens - sum(share.given_tokens(prompt, index) for share in shares)))
            for prompt, index, tokens in run.lengths()
        ]
