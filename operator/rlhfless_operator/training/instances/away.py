"""Letting actors go while all of their samples wait for environments, where that is cheaper than to keep them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from rlhfless_functions.api import Shelter
from rlhfless_operator.errors import UserError
from rlhfless_operator.planner.acting import Acting
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.platforms.shelters import ShelterHost
from rlhfless_operator.training.instances.capacity import Capacity

LEAST_PATIENCE = 0.5
"""Least seconds of waiting after which an actor is let go."""
_WAIT, _AWAY_TOKEN, _GIVEN_TOKEN = "environment/wait", "environment/token", "environment/given_token"
"""Names in the history of the seconds for an answer, and of what a sample waits and is given for each token."""


class Away:
    """The episodes of one rollout in a shelter.

    Args:
        host: has them.
        rollout: name of the rollout.
        patience: seconds of waiting after which an actor is let go.
        actors: number of actors with which the rollout begins.
    """

    def __init__(self, host: ShelterHost, rollout: str, patience: float, actors: int) -> None:
        self._host = host
        self._rollout = rollout
        self._patience = patience
        self._actors = actors

    async def shelter(self) -> Shelter | None:
        """Return the place of the environments, for a request; None if it does not start again after it has died. Then
        the episodes are beside the engine, as ever."""
        try:
            url = await self._host.url()
        except UserError:
            return None
        return Shelter(
            url=url,
            token=self._host.token,
            rollout=self._rollout,
            actors=self._actors,
            patience_seconds=self._patience,
        )

    async def come(self, samples: Sequence[Key]) -> None:
        """Wait until an environment has answered one of the samples."""
        while not await self._host.come(self._rollout, list(samples)):
            pass


def acting_by_token(history: History) -> Acting:
    """Return how samples acted in earlier steps, for each token that they sampled."""
    return Acting(history.mean(_AWAY_TOKEN), history.mean(_GIVEN_TOKEN))


class LettingActorsGo:
    """Decides whether a rollout's actors are let go while environments work.

    Args:
        host: keeps the episodes meanwhile; None if there is none here, or if the job wants none.
        capacity: knows what letting an instance go and having one again costs.
        history: of earlier steps; added to.
    """

    def __init__(self, host: ShelterHost | None, capacity: Capacity, history: History) -> None:
        self._host = host
        self._capacity = capacity
        self._history = history
        self._starting: asyncio.Future[None] | None = None
        self._opened = 0

    def learn(self, metrics: Mapping[str, float]) -> None:
        """Note how long a rollout's environments took for an answer."""
        turns, seconds = metrics.get("environment/turns"), metrics.get("environment/seconds_away")
        if not turns or seconds is None:
            return
        self._history.add(_WAIT, seconds / turns)
        if tokens := metrics.get("lengths"):
            self._history.add(_AWAY_TOKEN, seconds / tokens)
            self._history.add(_GIVEN_TOKEN, metrics.get("environment/given", 0.0) / tokens)
        if self._host is not None and self._pays:
            # It takes seconds to start, in which no instance should wait.
            self._starting = asyncio.ensure_future(self._host.warm())
            self._starting.add_done_callback(lambda start: start.cancelled() or start.exception())

    @asynccontextmanager
    async def rollout(self, name: str, actors: int) -> AsyncIterator[Away | None]:
        """Open a rollout; yield None if its actors are kept."""
        if self._host is None or not self._pays:
            yield None
            return
        # A name that has ended is refused, and a step may have a rollout again.
        self._opened += 1
        name = f"{name}-{self._opened}"
        async with AsyncExitStack() as opened:
            away: Away | None = Away(self._host, name, self._patience, actors)
            try:
                await opened.enter_async_context(self._host.rollout(name))
            except UserError:
                # Without it the episodes are beside the engine, as ever.
                away = None
            yield away

    @property
    def _patience(self) -> float:
        return max(LEAST_PATIENCE, self._capacity.switch_seconds("generation"))

    @property
    def _pays(self) -> bool:
        """Whether environments take longer than letting an instance go and having one again."""
        return self._history.mean(_WAIT) >= self._patience
