"""How a pool is divided among namespaces when the chart does not divide it."""

from collections.abc import Mapping


def divide(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Max-min fair parts in whole units: each namespace gets what it wants or as much as any other, and what one does
    not want goes to the others. Units that can't be divided evenly go to the namespaces that came first.

    Args:
        wanted: units that each namespace can use, in the order in which they came.
        total: units that there are.
    """
    parts = dict.fromkeys(wanted, 0)
    left = total
    while hungry := [name for name, most in wanted.items() if parts[name] < most]:
        for name in hungry:
            if left == 0:
                return parts
            parts[name] += 1
            left -= 1
    return parts
