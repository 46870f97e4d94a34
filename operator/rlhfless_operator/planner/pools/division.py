"""The division of a pool among namespaces when the chart does not divide it."""

from collections.abc import Mapping


def divide(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Return max-min fair parts in whole units.

    Each namespace gets the units that it can use, or as many as any other. Units that it does not want go to the
    others. Units that can't be divided evenly go to the namespaces that came first.

    Args:
        wanted: units that each namespace can use, in the order in which the namespaces came.
        total: number of units.
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
