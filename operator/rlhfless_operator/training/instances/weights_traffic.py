"""How far new weights go: bytes that generation instances read, by where the learner was that made them.

This counts what instances read from the artifact store, and not what they pass on to each other (`relays`). On a volume
that nodes share, a read on the learner's own node may come from this node's page cache. In an object store it comes
from the store, and may be what changed since the version before instead of all of it.
"""

from collections import Counter

from rlhfless_functions.api import Event, Progress, Started
from rlhfless_operator.planner.pools.placement import Distance, distance


class WeightsTraffic:
    """Counts each version once for each instance that takes it over, where the platform tells places. A version that an
    earlier driver had made is not counted: who made it is not known any more."""

    def __init__(self) -> None:
        self._version = -1
        self._bytes = 0
        self._made_at: list[str] = []
        self._readers: set[str] = set()
        self._counted: Counter[Distance] = Counter()

    def published(self, version: int, size: int, place: list[str]) -> None:
        """A learner has made a version.

        Args:
            size: its bytes.
            place: of the learner; see `Started.place`.
        """
        self._version, self._bytes, self._made_at = version, size, place
        self._readers.clear()

    def read(self, instance: str, version: int, place: list[str], fetched: int | None = None) -> None:
        """An instance generates with a version.

        Args:
            instance: its name.
            version: of the weights.
            place: of the instance; see `Started.place`.
            fetched: bytes that it took, where it knows: with an object store. The version's own if left out.
        """
        far = distance(self._made_at, place)
        if version == self._version and instance not in self._readers and far is not None:
            self._readers.add(instance)
            self._counted[far] += self._bytes if fetched is None else fetched

    def take(self) -> dict[str, float]:
        """What was read since the last call, as a step's metrics name it; only distances that occurred."""
        counted, self._counted = self._counted, Counter()
        return {f"weights/bytes_{far}": float(size) for far, size in counted.items()}


class ReadsOfVersion:
    """Hears from the actors of a rollout which instances generate with which weights.

    Args:
        traffic: is told.
    """

    def __init__(self, traffic: WeightsTraffic) -> None:
        self._traffic = traffic
        self._versions: dict[str, int] = {}
        self._started: dict[str, Started] = {}

    def asks(self, actor: str, version: int) -> None:
        """An actor makes a request with a version of the weights."""
        self._versions[actor] = version

    def version_of(self, actor: str) -> int:
        """The version that the actor's newest request asks for."""
        return self._versions[actor]

    def __call__(self, actor: str, event: Event) -> None:
        """The request of an actor has said something."""
        if isinstance(event, Started):
            self._started[actor] = event
        elif isinstance(event, Progress) and (started := self._started.pop(actor, None)) is not None:
            # The first progress of a request is told when its engine has the weights.
            self._traffic.read(started.instance, self._versions[actor], started.place, event.weights_bytes)
