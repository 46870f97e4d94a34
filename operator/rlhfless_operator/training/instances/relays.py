"""The chain in which a job's generation instances pass new weights on.

Its head reads the store, and each other instance fetches from the one before it, which passes on what it has while it
fetches the rest. Every link carries the version once, and the last instance has it hardly later than the first.
Laminar (arXiv 2510.12633) has relays that pass weights on; lambda-Scale (arXiv 2502.09922) streams models between
instances as they load.
"""

from rlhfless_functions.api import Event, Started
from rlhfless_operator.platforms.base import StateChange

_VERSIONS = 24
"""Chains that are kept: more than there are versions that requests under way were told of. With `maxStaleness: 8` these
are the newest, eight before it and eight after it."""


class Relays:
    """Knows where instances are reached, as they say it themselves with each request."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}
        """By address, the newest version that the instance was asked to generate with."""
        self._addresses: dict[str, str] = {}
        """By instance."""
        self._chains: dict[int, list[str]] = {}

    def heard(self, event: Event, version: int) -> None:
        """An actor that generates with a version has said something."""
        if isinstance(event, Started) and event.address is not None:
            self._heard[event.address] = max(version, self._heard.get(event.address, 0))
            self._addresses[event.instance] = event.address

    def instance_changed(self, change: StateChange) -> None:
        """An instance has another state. One that ends leaves all chains: those after it would wait for it in vain."""
        if change.state not in ("draining", "ended") or change.instance not in self._addresses:
            return
        address = self._addresses.pop(change.instance)
        self._heard.pop(address, None)
        self._chains = {
            version: [each for each in addresses if each != address] for version, addresses in self._chains.items()
        }

    def chain(self, version: int) -> list[str]:
        """Addresses in their order, the same for all requests of a version: those of the instances that generated with
        the last version that any of them generated with, and have not ended."""
        # The first requests of a job ask for the versions to come before any instance has said anything.
        if not self._chains.get(version):
            last = max((each for each in self._heard.values() if each < version), default=-1)
            self._heard = {address: each for address, each in self._heard.items() if each >= last}
            self._chains[version] = list(self._heard)
            # Rollouts of an asynchronous job ask for some versions in turns, and none asks for these any more.
            for old in sorted(self._chains)[:-_VERSIONS]:
                del self._chains[old]
        return self._chains.get(version, [])
