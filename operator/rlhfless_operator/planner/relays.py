"""Who fetches a version of the weights from whom, where each instance would read all of it from an object store.

Instances form a chain. Its head reads the store, and each other one fetches from the one before it, which passes on
what it has while it fetches the rest. Every link carries the version once, and the last instance has it hardly later
than the first (Laminar, arXiv 2510.12633, has relays that pass weights on; lambda-Scale, arXiv 2502.09922, streams
models between instances as they load).
"""

from collections.abc import Mapping, Sequence


def chain(instances: Sequence[str], links: Mapping[str, float] | None = None) -> list[str]:
    """The order in which instances fetch: those with the fastest links first, as each slows down all that follow it.

    Args:
        instances: their addresses, each once.
        links: bytes a second that an instance sends, where that is known. The others keep their order behind these.
    """
    known = links or {}
    return sorted(instances, key=lambda instance: -known.get(instance, 0.0))


def chain_seconds(size: float, store: float, links: Sequence[float], chunk: float) -> float:
    """Time until the last instance of a chain has a version.

    Args:
        size: bytes of the version.
        store: bytes a second that one reader gets of the store.
        links: bytes a second that each instance but the last sends to the next one.
        chunk: bytes that an instance has before it passes them on.
    """
    chunk = min(chunk, size)
    slowest = min((store, *links))
    # The first chunk passes every link; the others follow it at the speed of the slowest.
    return chunk / store + sum(chunk / link for link in links) + (size - chunk) / slowest


def store_seconds(size: float, store: float, instances: int) -> float:
    """Time until the last of some instances has a version that each reads from a store with one link."""
    return instances * size / store
