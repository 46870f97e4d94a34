"""Samples that earlier attempts left of a share: the finished ones, and the longest partial ones."""

from collections.abc import Collection, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rlhfless_functions import artifacts
from rlhfless_functions.data.rollouts import GeneratedSample, read_rollouts


@dataclass
class EarlierSamples:
    """Samples by (prompt, index)."""

    finished: dict[str, list[GeneratedSample]] = field(default_factory=dict)
    """Finished samples, by the part that holds them."""
    partial: dict[tuple[int, int], GeneratedSample] = field(default_factory=dict)
    """The longest partial sample of each that is not finished, by (prompt, index)."""


def rollout_parts(sink: str) -> list[str]:
    """Return the URIs of the parts in an attempt's folder, oldest first. A part is whole or absent, however the attempt
    ended."""
    return [uri for uri in artifacts.list_files(sink) if uri.endswith(".parquet")]


def find_earlier(
    places: Iterable[str],
    wanted: Collection[tuple[int, int]],
    versions: Container[int],
    known_until: Mapping[str, str] | None = None,
) -> EarlierSamples:
    """Look through earlier attempts.

    Args:
        places: folders of the attempts, or single parts, in any order.
        wanted: the samples of the share.
        versions: weights versions whose tokens count. A sample with a token of another version is skipped.
        known_until: by folder, a part that is skipped with all before it.

    Raises:
        ArtifactError: if the store cannot be read.
    """
    passed_over = known_until or {}

    def parts_of(place: str) -> list[str]:
        if place.endswith(".parquet"):
            return [place]
        return [part for part in rollout_parts(place) if part > passed_over.get(place, "")]

    with ThreadPoolExecutor(8) as pool:
        listed = pool.map(parts_of, dict.fromkeys(places))
        parts = list(dict.fromkeys(part for found in listed for part in found))
        contents = list(pool.map(lambda part: read_rollouts([part], wanted), parts))
    earlier = EarlierSamples()
    finished: set[tuple[int, int]] = set()
    for part, rollouts in zip(parts, contents, strict=True):
        for key, rollout in rollouts.items():
            if any(span.version not in versions for span in rollout.versions) or not rollout.response_tokens:
                continue
            if rollout.finished and key not in finished:
                finished.add(key)
                earlier.finished.setdefault(part, []).append(rollout)
            known = earlier.partial.get(key)
            if not rollout.finished and (known is None or len(known.response_tokens) < len(rollout.response_tokens)):
                earlier.partial[key] = rollout
    for key in finished:
        earlier.partial.pop(key, None)
    return earlier
