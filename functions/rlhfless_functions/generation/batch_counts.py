"""The counts of a batch, over all of its runs and shares."""

from collections import Counter

from rlhfless_functions.api import DecodeCounts, GenerationResult, WeightsFetched
from rlhfless_functions.generation.engines.base import ComputedTokens, EngineRun


class BatchCounts:
    """The counts of a batch so far, and the result that they become."""

    def __init__(self) -> None:
        self._total = GenerationResult(finished=0, unfinished=0, parts=[], prompt_tokens=0, response_tokens=0)
        self._before = ComputedTokens()
        """Counts of the runs before this one."""
        self._decoded: Counter[str] = Counter()
        self.waited_seconds = 0.0
        """Seconds in which nothing was computed, because all samples were with their environments or yet to come."""
        self._idle_seconds = 0.0
        """Seconds without any samples since the last ones finished."""
        self.weights_seconds = 0.0
        """Seconds until the engine had its first weights."""

    @property
    def finished(self) -> int:
        """Number of finished samples of the shares that have ended."""
        return self._total.finished

    @property
    def fetched(self) -> WeightsFetched:
        """Counts of what was fetched of the weights."""
        return self._total.weights_fetched

    def has_fetched(self, fetched: WeightsFetched) -> None:
        """Add what was fetched of the weights."""
        more = {name: number + getattr(self.fetched, name) for name, number in fetched}
        self._total = self._total.model_copy(update={"weights_fetched": WeightsFetched.model_validate(more)})

    def ended(self, share: GenerationResult) -> None:
        """Add the result of a share that has ended."""
        update = {name: getattr(self._total, name) + getattr(share, name) for name in ("finished", "unfinished")}
        self._total = self._total.model_copy(update={**update, "parts": [*self._total.parts, *share.parts]})

    def passed(self, seconds: float, *, waits: bool, idle: bool) -> None:
        """Note that time has passed.

        Args:
            waits: whether all samples were with their environments.
            idle: whether there were none. That counts once others have come.
        """
        if idle:
            self._idle_seconds += seconds
            return
        self.waited_seconds += self._idle_seconds + (seconds if waits else 0.0)
        self._idle_seconds = 0.0

    def closes(self, run: EngineRun) -> None:
        """Add the counts of a run that another one follows."""
        self._before += run.computed
        self._decoded.update(run.decoding().model_dump())

    def now(self, run: EngineRun | None) -> tuple[ComputedTokens, DecodeCounts]:
        """Return the counts so far, with those of the present run."""
        if run is None:
            return self._before, DecodeCounts.model_validate(self._decoded)
        counts = self._decoded + Counter(run.decoding().model_dump())
        return self._before + run.computed, DecodeCounts.model_validate(counts)

    def result(self, run: EngineRun | None, *, all_wait: bool) -> GenerationResult:
        """Return the result of the batch with its last run."""
        computed, decoding = self.now(run)
        return self._total.model_copy(
            update={
                "weights_seconds": self.weights_seconds,
                "waited_seconds": round(self.waited_seconds, 4),
                "all_wait": all_wait,
                "prompt_tokens": computed.prompt,
                "response_tokens": computed.response,
                "shared_prefixes": run.prefix_traffic() if run is not None else {},
                "decoding": decoding,
            }
        )
