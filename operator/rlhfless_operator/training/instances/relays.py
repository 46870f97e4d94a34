"""The chain in which a job's generation instances pass new weights on.

Its head reads the store. Each other instance fetches from the one before it, which passes on what it has while it
fetches the rest. Every link carries the version once, and the last instance has it hardly later than the first. Laminar
(arXiv 2510.12633) has relays that pass weights on; lambda-Scale (arXiv 2502.09922) streams models between instances as
they load.
"""

from rlhfless_functions.api import Event, Started
from rlhfless_operator.platforms.base import StateChange

_VERSIONS = 24
"""Number of chains that are kept: more than the versions that current requests were told of. With `maxStaleness: 8`
these are the newest, eight before it and eight after it."""


class Relays:
    """The addresses of instances, as they report them with each request."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        """Newest version that each instance was asked to generate with, by address."""
        self._addresses: dict[str, str] = {}
        """Address of each instance."""
        self._chains: dict[int, list[str]] = {}

    def heard(self, event: Event, version: int) -> None:
        """Note an event of an actor that generates with a version."""
        if isinstance(event, Started) and event.address is not None:
            self._heard[event.address] = max(version, self._heard.get(event.address, 0))
            self._addresses[event.instance] = event.address

    def instance_changed(self, change: StateChange) -> None:
        """Note an instance's change of state. One that ends leaves all chains: those after it would wait for it in
        vain."""
        if change.state not in ("draining", "ended") or change.instance not in self._addresses:
            return
        address = self._addresses.pop(change.instance)
        self._heard.pop(address, None)
        self._chains = {
            version: [each for each in addresses if each != address] for version, addresses in self._chains.items()
        }

    def chain(self, version: int) -> list[str]:
        """Return the addresses of a version's chain in order, the same for all its requests.

        They are the instances that generated with the last version before it that any of them used, and have not ended.
        """
        # The first requests of a job ask for the versions to come before any instance has reported.
        if not self._chains.get(version):
            last = max((each for each in self._heard.values() if each < version), default=-1)
            self._heard = {address: each for address, each in self._heard.items() if each >= last}
            self._chains[version] = list(self._heard)
            # Rollouts of an asynchronous job alternate between some versions, and none asks for these any more.
            for old in sorted(self._chains)[:-_VERSIONS]:
                del self._chains[old]
        return self._chains.get(version, [])
