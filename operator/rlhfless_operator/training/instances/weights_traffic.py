"""The bytes of new weights that generation instances read, by their distance from the learner that made them.

This counts what instances read from the artifact store, and not what they pass on to each other (`relays`). On a volume
that nodes share, a read on the learner's own node may come from this node's page cache. In an object store it comes
from the store, and may be only the difference from the version before.
"""

from collections import Counter

from rlhfless_functions.api import Event, Progress, Started
from rlhfless_operator.planner.pools.placement import Distance, distance


class WeightsTraffic:
    """Counts each version once for each instance that loads it, if the platform tells places.

    A version that an earlier driver had made is not counted, because the place of its learner is unknown.
    """

    def __init__(self) -> None:
        self._version = -1
        self._bytes = 0
        self._made_at: list[str] = []
        self._readers: set[str] = set()
        self._counted: Counter[Distance] = Counter()

    def published(self, version: int, size: int, place: list[str]) -> None:
        """Note that a learner has made a version.

        Args:
            size: its bytes.
            place: of the learner; see `Started.place`.
        """
        self._version, self._bytes, self._made_at = version, size, place
        self._readers.clear()

    def read(self, instance: str, version: int, place: list[str], fetched: int | None = None) -> None:
        """Note that an instance generates with a version.

        Args:
            instance: its name.
            version: of the weights.
            place: of the instance; see `Started.place`.
            fetched: bytes that it read, if it knows them: with an object store. The version's own size if left out.
        """
        far = distance(self._made_at, place)
        if version == self._version and instance not in self._readers and far is not None:
            self._readers.add(instance)
            self._counted[far] += self._bytes if fetched is None else fetched

    def take(self) -> dict[str, float]:
        """Return the bytes read since the last call, named as in a step's metrics; only distances that occurred."""
        counted, self._counted = self._counted, Counter()
        return {f"weights/bytes_{far}": float(size) for far, size in counted.items()}


class ReadsOfVersion:
    """Hears from a rollout's actors which instances generate with which weights.

    Args:
        traffic: counts them.
    """

    def __init__(self, traffic: WeightsTraffic) -> None:
        self._traffic = traffic
        self._versions: dict[str, int] = {}
        self._started: dict[str, Started] = {}

    def asks(self, actor: str, version: int) -> None:
        """Note that an actor makes a request with a version of the weights."""
        self._versions[actor] = version

    def version_of(self, actor: str) -> int:
        """Return the version of the actor's newest request."""
        return self._versions[actor]

    def __call__(self, actor: str, event: Event) -> None:
        """Take in an event of an actor's request."""
        if isinstance(event, Started):
            self._started[actor] = event
        elif isinstance(event, Progress) and (started := self._started.pop(actor, None)) is not None:
            # The first progress of a request comes when its engine has the weights.
            self._traffic.read(started.instance, self._versions[actor], started.place, event.weights_bytes)
