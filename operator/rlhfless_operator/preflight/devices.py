"""Count the devices of a DeviceClass that the ResourceSlices of a cluster offer (Dynamic Resource Allocation).

The scheduler picks devices by the class's CEL selectors. This module reads their common terms: `device.driver == '...'`
and `device.attributes['...'].NAME == '...'`. If a selector has other terms, the count is an upper bound.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DRIVER = re.compile(r"device\.driver == (?:'([^']*)'|\"([^\"]*)\")")
_ATTRIBUTE = re.compile(r"device\.attributes\[['\"]([^'\"]+)['\"]\]\.(\w+) == (?:'([^']*)'|\"([^\"]*)\")")
_IN_PARENTHESES = re.compile(r"\([^()]*\)")
_KEPT_AWAY = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class DynamicResources:
    """A cluster's support for Dynamic Resource Allocation."""

    server: str
    """Version of the API server."""
    versions: tuple[str, ...]
    """Versions of `resource.k8s.io` that it serves."""
    classes: Mapping[str, Mapping[str, Any]] | None = None
    """DeviceClasses by name; None if they can't be listed."""
    slices: Sequence[Mapping[str, Any]] | None = None
    """ResourceSlices; None if they can't be listed."""
    refusal: str = ""
    """Reason why these can't be listed."""

    @property
    def has_claims(self) -> bool:
        """Whether the server has ResourceClaims of the version that slots use."""
        return "v1" in self.versions


@dataclass(frozen=True)
class Offer:
    """The devices of a class."""

    by_place: Mapping[str, int]
    """Number of devices by node, or by a device pool that belongs to no single node."""
    exact: bool
    """Whether the count is exact; otherwise it is an upper bound."""

    @property
    def total(self) -> int:
        """Number of devices on all nodes."""
        return sum(self.by_place.values())

    @property
    def largest(self) -> int:
        """Number of devices on the node with the most."""
        return max(self.by_place.values(), default=0)

    def in_groups_of(self, together: int) -> int:
        """Return the number of devices that can be allocated in groups, each on one node."""
        return sum(count // together * together for count in self.by_place.values())


@dataclass(frozen=True)
class _Terms:
    """The terms that could be read from selectors."""

    drivers: frozenset[str]
    attributes: frozenset[tuple[str, str, str]]
    """Domain, name and value of each attribute."""
    exact: bool

    def pick(self, driver: str, device: Mapping[str, Any]) -> bool:
        """Return whether a device matches the terms."""
        if self.drivers - {driver}:
            return False
        found = device.get("attributes") or {}
        return all(_attribute(found, driver, domain, name) == value for domain, name, value in self.attributes)


def offer_of(device_class: Mapping[str, Any], slices: Sequence[Mapping[str, Any]]) -> Offer:
    """Return the devices of the drivers that a class picks."""
    selectors = (device_class.get("spec") or {}).get("selectors") or []
    terms = _read([(selector.get("cel") or {}).get("expression", "") for selector in selectors])
    counts: dict[str, int] = defaultdict(int)
    exact = terms.exact
    for spec in _newest(slices):
        place = spec.get("nodeName") or f"pool {spec['pool']['name']} of {spec['driver']}"
        for device in spec.get("devices") or []:
            if terms.pick(spec["driver"], device) and not _kept_away(device):
                counts[place] += 1
                # Partitions of one device exclude each other.
                exact = exact and not device.get("consumesCounters")
    return Offer(counts, exact)


def _newest(slices: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Return the newest slices of each device pool. An outdated description of a pool may still exist beside the new
    one."""
    specs = [found["spec"] for found in slices]
    newest: dict[tuple[str, str], int] = {}
    for spec in specs:
        key = (spec["driver"], spec["pool"]["name"])
        newest[key] = max(newest.get(key, 0), spec["pool"].get("generation", 0))
    for spec in specs:
        if spec["pool"].get("generation", 0) == newest[spec["driver"], spec["pool"]["name"]]:
            yield spec


def _kept_away(device: Mapping[str, Any]) -> bool:
    return any(taint.get("effect") in _KEPT_AWAY for taint in device.get("taints") or [])


def _attribute(attributes: Mapping[str, Mapping[str, Any]], driver: str, domain: str, name: str) -> str | None:
    """Return an attribute's text. An attribute without a domain belongs to its driver's domain."""
    found = attributes.get(f"{domain}/{name}") or (attributes.get(name) if domain == driver else None) or {}
    text: str | None = found.get("string")
    return text


def _read(expressions: Iterable[str]) -> _Terms:
    drivers: set[str] = set()
    attributes: set[tuple[str, str, str]] = set()
    exact = True
    for expression in expressions:
        for term in _conjunction(expression):
            if (found := _DRIVER.fullmatch(term)) is not None:
                drivers.add(found[1] or found[2] or "")
            elif (found := _ATTRIBUTE.fullmatch(term)) is not None:
                attributes.add((found[1], found[2], found[3] or found[4] or ""))
            else:
                exact = False
    return _Terms(frozenset(drivers), frozenset(attributes), exact)


def _conjunction(expression: str) -> list[str]:
    """Return the terms of a conjunction; for any other expression, the expression itself."""
    outside, before = expression, ""
    while outside != before:
        outside, before = _IN_PARENTHESES.sub("", outside), outside
    if "||" in outside or "?" in outside:
        return [expression]
    return [" ".join(term.split()) for term in outside.split("&&")]
