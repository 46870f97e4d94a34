"""The generation stage: samples the responses of a share at one weights version, and publishes them as they finish.

A response that older weights began keeps their tokens and log-probabilities. The rest is sampled with the request's
weights, which compute the keys and values of all earlier tokens anew. If the request says so, the engine keeps those of
the older weights instead, as far as it has them.
"""

import logging
import time
from collections.abc import Callable, Sequence

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    GenerationRequest,
    GenerationResult,
    NextWeights,
    WeightsFetched,
    WeightsReference,
)
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.environments.sheltered import ShelteredEpisodes
from rlhfless_functions.generation.engines.base import Engine
from rlhfless_functions.generation.engines.choice import EngineChoice, choose_engine, make_engine
from rlhfless_functions.generation.live_batch import LiveBatch
from rlhfless_functions.generation.prefetching import WeightsPrefetcher
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import EngineSettings, ModelSettings

logger = logging.getLogger(__name__)


class Generator:
    """The code of the generation stage, with the caches of one instance.

    Args:
        engine: the engine; by default the engine of the settings.
        clock: monotonic seconds.
        settings: settings of the engine, until a request brings others.
        episodes_of: opens the environments of a request; None if its responses have one turn.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: EngineSettings | None = None,
        episodes_of: Callable[[GenerationRequest], Episodes | None] = lambda request: None,
    ) -> None:
        self._given = engine
        self._clock = clock
        self._episodes_of = episodes_of
        self._settings = settings or EngineSettings()
        self._made: tuple[EngineChoice, EngineSettings, Engine] | None = None
        self._told = artifacts.fetched()
        """Fetches that earlier requests have reported. An instance of generation fetches nothing but weights."""
        self._loaded = False
        """Whether an engine has had weights. Only the first weights are loaded while they arrive."""
        self._prefetcher = WeightsPrefetcher()
        self._relayed: WeightsReference | None = None
        """The version that this instance has passed on last."""

    @property
    def engine(self) -> str | None:
        """The engine that generates and the reason for it; None until it has been chosen."""
        return str(self._made[0]) if self._made else None

    def preload(
        self, model: ModelSettings, weights: WeightsReference, sources: artifacts.Sources | None = None
    ) -> None:
        """Load weights before the first request.

        Args:
            model: the model.
            weights: its weights.
            sources: other instances to fetch them from.

        Raises:
            TaskError: if they cannot be had.
        """
        self._load(self._engine(self._settings, model), model, weights, sources)

    def run(self, request: GenerationRequest, context: TaskContext) -> GenerationResult:
        """Generate a share and what joins its batch, or as much of it as time allows.

        Samples that an earlier attempt finished are announced again and not generated. Partial ones are continued. When
        the task is told to stop, everything sampled so far is published, and the result counts the rest.

        Raises:
            TaskError: the share, the prompts or the weights can't be had, or the model has diverged.
        """
        engine = self._engine(request.engine, request.model)

        def load(present: NextWeights, upcoming: Sequence[NextWeights]) -> WeightsFetched:
            sources = _sources(present.weights_from, present.weights_line, context)
            prefetched = self._load(engine, request.model, present.weights, sources)
            self._watch(engine, request, context, present.weights.version, upcoming)
            return self._fetched(prefetched)

        with store_errors():
            return LiveBatch(request, context, engine, load, self._prefetcher, self._clock, self._open_episodes).run()

    def _open_episodes(self, request: GenerationRequest) -> Episodes | None:
        """Open the environments of a share; None if a response is a single turn."""
        if request.shelter is not None and request.environment is not None:
            environment, model, arguments = request.environment, request.model, request.chat_template_kwargs
            return ShelteredEpisodes(request.shelter, environment, model, arguments)
        return self._episodes_of(request)

    def sleep(self) -> None:
        """Give the device's memory back. The choice of the engine stays.

        Raises:
            TaskError: `engine_lost`, if only the end of the process releases the memory.
        """
        self._prefetcher.stop()
        engine = self._given or (self._made[2] if self._made else None)
        if engine is not None:
            engine.sleep()

    def _load(
        self, engine: Engine, model: ModelSettings, weights: WeightsReference, sources: artifacts.Sources | None
    ) -> bool:
        """Load weights. Return whether they had been prefetched."""
        prefetched = self._prefetcher.take(weights)
        self._relay(weights, sources)
        engine.load(model, weights, prefetched)
        self._loaded = True
        return prefetched is not None

    def _watch(
        self,
        engine: Engine,
        request: GenerationRequest,
        context: TaskContext,
        present: int,
        upcoming: Sequence[NextWeights],
    ) -> None:
        """Prefetch newer weights while this request decodes with those of version `present`."""

        def fetch(upcoming: NextWeights) -> object:
            with store_errors():
                self._relay(upcoming.weights, _sources(upcoming.weights_from, upcoming.weights_line, context))
            return engine.prefetch(request.model, upcoming.weights)

        self._prefetcher.watch(present, upcoming, fetch)

    def _relay(self, weights: WeightsReference, sources: artifacts.Sources | None) -> None:
        """Fetch weights from other instances, and pass them on. Do nothing for an adapter, or on a file system of this
        machine."""
        travels = weights.adapter is None and artifacts.local_path(weights.uri) is None
        if sources is not None and travels and self._relayed != weights:
            # The engine finds the copy, and does not know its source.
            arriving = artifacts.arrive(weights.uri, sources=sources)
            if self._loaded:
                arriving.result()
            self._relayed = weights

    def _fetched(self, prefetched: bool) -> WeightsFetched:
        """Return the counts of fetches since the last request."""
        before, self._told = self._told, artifacts.fetched()
        more = {name: number - getattr(before, name) for name, number in self._told}
        return WeightsFetched(**more | {"prefetched": int(prefetched)})

    def _engine(self, settings: EngineSettings, model: ModelSettings) -> Engine:
        """Return the present engine, if it is the wanted one; make it otherwise."""
        if self._given is not None:
            return self._given
        choice = choose_engine(settings, model)
        if self._made is None or self._made[:2] != (choice, settings):
            logger.info("generation engine chosen", extra={"fields": {"engine": choice.name, "reason": choice.reason}})
            self._made = (choice, settings, make_engine(choice, settings))
        return self._made[2]


def _sources(chain: Sequence[str] | None, line: str | None, context: TaskContext) -> artifacts.Sources | None:
    """Return the instances from which to fetch weights; None if the store is the only source."""
    return artifacts.Sources.of_chain(chain, context.address, context.token, line) if chain is not None else None
