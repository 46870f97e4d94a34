"""Documents that are almost jobs: any field of the model with values that are wrong there."""

import copy
import random
from typing import Any

from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.spec import RLHFJobSpec
from tests.jobs import small_job

_FIELDS = [path for path, _ in walk(RLHFJobSpec)]

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, -0.5, 1e-300, 1e300, 2**31, 2**53, 2**63, -(2**63)),
    *("", " ", "x", "10", "ten", "true", "null", "x" * 10_000, "\0", "a\0b", "\ud83d\ude00", "é\n", "../..", "/"),
    *("0s", "1s", "-1s", "1", "1h30m", f"{'9' * 30}d", f"{'9' * 400}d", "0.0000001ms", "1.5.5s", "5 s"),
    *("0", "2.50", "-2", "1e3", f"{'9' * 400}", "NaN", "Infinity", "16Gi", "9999999Ti", f"{'9' * 40}", "1Zi", "500m"),
    *("~nobody-at-all/x", "s3://", "s3://bucket/x", "http://[", "nowhere://x", "::", "a::b", "file:///x", "{{", "{% x"),
    *("[", "(", "(?P<x", "a" * 300 + "/b", "grpo", "ppo", "USD"),
    *([], [None], [[]], ["x"], [1, 2], [{}], {}, {"x": 1}, {"x": {"y": []}}, {"": ""}, {"source": "x"}, {"name": "x"}),
)


def mutated(chance: random.Random) -> dict[str, Any]:
    """A small job with one to three faults, or oddities."""
    document = small_job(steps=2)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _mutate(document, chance)
    return document


def _mutate(document: dict[str, Any], chance: random.Random) -> None:
    *parents, name = chance.choice(_FIELDS)
    place: Any = document["spec"]
    for parent in parents:
        place = _inside(place, parent)
        if place is None:
            return
    match chance.randrange(8):
        case 0:
            place.pop(name, None)
        case 1:
            place[chance.choice((f"{name}s", name.upper(), f"{name}_", "unknown", ""))] = chance.choice(_VALUES)
        case 2 if isinstance(place.get(name), list):
            place[name] = place[name] * chance.choice((2, 40))
        case _:
            place[name] = copy.deepcopy(chance.choice(_VALUES))


def _inside(place: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The mapping below `name`, made where it is missing; None where something else is in its place."""
    if name.endswith("[]"):
        items = place.setdefault(name.removesuffix("[]"), [])
        if not isinstance(items, list):
            return None
        if not items:
            items.append({})
        found = items[0]
    else:
        found = place.setdefault(name, {})
    return found if isinstance(found, dict) else None
