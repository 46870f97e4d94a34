"""What an API server does with the JSON patch (RFC 6902) of a webhook, as far as ours are concerned."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any


def patched(document: Mapping[str, Any], patch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A document after `add` and `remove` of members of objects."""
    result: dict[str, Any] = copy.deepcopy(dict(document))
    for operation in patch:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = result
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        if operation["op"] == "add":
            place[last] = operation["value"]
        else:
            del place[last]
    return result
