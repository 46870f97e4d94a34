"""The seconds that instances take to start, to wake and to end, by their changes of state."""

from collections.abc import Mapping

from rlhfless_operator.platforms.base import InstanceState, StateChange

_TIMED: Mapping[InstanceState, tuple[str, tuple[InstanceState, ...]]] = {
    "starting": ("startup", ("idle", "busy")),
    "switching": ("waking", ("busy",)),
    "draining": ("draining", ("ended",)),
}
"""The name in the history of the time in a state, and the states that end it well."""


class StateTimes:
    """Measures the states of instances that cost time without work."""

    def __init__(self) -> None:
        self._newest: dict[str, StateChange] = {}

    def observe(self, change: StateChange) -> tuple[str, float] | None:
        """Return the name in the history, and the seconds, of what ended well with a change; None if nothing did."""
        before = self._newest.pop(change.instance, None)
        if change.state != "ended":
            self._newest[change.instance] = change
        if before is None or before.state not in _TIMED:
            return None
        name, ends = _TIMED[before.state]
        return (f"{name}/{change.stage}", change.at - before.at) if change.state in ends else None
