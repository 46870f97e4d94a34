"""The pods of one stage: the state of each, for the ledger and for the stage's requests."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rlhfless_functions.api import Stage
from rlhfless_operator.platforms.base import InstanceState, StateChange, StateListener
from rlhfless_operator.platforms.pods.pod_watch import PodView
from rlhfless_operator.platforms.pods.scaling import StageSituation

_LATE_SECONDS = 2.0
"""Creation times are whole seconds. If the news of a pod is later than this, the pod's creation time counts instead."""
_PREPARATION_SECONDS = 15.0
"""Time limit for a node to prepare a pod, in seconds; it normally takes one or two."""
_KEPT_PROBLEMS = 8
_UNMEASURED_START_SECONDS = 10.0
"""Assumed seconds of a start, before one was measured."""
_COST_OF_WORK = "1000"
_COST_OF_KEEPING = "100"


@dataclass
class _Pod:
    """One pod in the book."""

    state: InstanceState = "starting"
    view: PodView | None = None
    """None until the watch has reported it."""
    starts_since: float | None = None
    """Time when its start was first seen, in monotonic seconds; None once it has started."""
    idle_since: float = 0.0
    busy: bool = False
    """True while it works on a request, and while it publishes after one."""
    asleep: bool = False
    """Whether it has released its slots' memory."""
    falling_asleep: bool = False
    """Whether it is releasing its slots' memory."""
    suspicion: str = ""
    """Reason why it does not start, if Kubernetes gives none."""
    to_be_prepared_by: float | None = None
    """Deadline for its node to prepare it, or time of the next check after that."""
    proven: bool = False
    """Whether it worked before the watch reported it ready; that report is still on its way."""
    fresh: bool = False
    """Whether it has had no task since its start: it has nothing to wake, and loading is part of its task."""

    @property
    def kept(self) -> bool:
        """Whether it exists and is not terminating."""
        return self.busy or self.view is None or not self.view.deleting

    @property
    def problem(self) -> str:
        """Its problem; empty if none is known."""
        return (self.view.problem if self.view is not None else "") or self.suspicion


@dataclass
class StagePods:
    """The book of one stage.

    Args:
        on_state: called with every change of a pod's state.
        on_change: called after every change.
    """

    stage: Stage
    on_state: StateListener
    on_change: Callable[[], None]
    begin_asleep: bool = False
    """Whether a started pod has nothing on its GPU yet, and waits for its turn."""
    wanted: int = 0
    """Wanted number of pods."""
    most: int | None = None
    """Number of pods that fit; None if only requests decide the number."""
    requests: int = 0
    """Requests under way."""
    sending: int = 0
    """Requests that no pod has taken yet."""
    start_seconds: float = _UNMEASURED_START_SECONDS
    """Seconds until a pod is ready, from the last start."""
    _pods: dict[str, _Pod] = field(default_factory=dict)
    _ended: dict[str, str] = field(default_factory=dict)
    """Problems of pods that are gone, the newest last."""

    # --- what the watch tells ---

    def changed(self, view: PodView, *, first: bool) -> None:
        """Record a pod that is new or has changed.

        Args:
            first: whether it existed before the subscription.
        """
        if view.ended:
            self.gone(view)
            return
        pod = self._pods.get(view.name)
        if pod is None:
            pod = self._pods[view.name] = _Pod()
            age = (datetime.now(UTC) - view.created).total_seconds()
            late = not first and age > _LATE_SECONDS
            self._enter(view.name, pod, "starting", before=age if late else 0.0)
        pod.view = view
        if not view.unprepared:
            pod.to_be_prepared_by = None
        elif pod.to_be_prepared_by is None:
            pod.to_be_prepared_by = time.monotonic() + _PREPARATION_SECONDS
        if not (view.overlooked or view.unprepared):
            pod.suspicion = ""
        pod.proven = pod.proven and not view.ready
        self._settle(view.name, pod)
        self.on_change()

    def suspect(self, instance: str, suspicion: str) -> None:
        """Record why a pod does not start if Kubernetes does not say; an empty text clears it."""
        pod = self._pods.get(instance)
        if pod is not None and pod.suspicion != suspicion:
            pod.suspicion = suspicion
            self.on_change()

    def unprepared(self, at: float) -> list[PodView]:
        """Return the pods that their nodes have not prepared within the limit.

        Each is returned again later: Kubernetes gives the reason only in events, and it may change.
        """
        found = []
        for pod in self._pods.values():
            if pod.to_be_prepared_by is not None and at >= pod.to_be_prepared_by and pod.view is not None:
                pod.to_be_prepared_by = at + _PREPARATION_SECONDS
                found.append(pod.view)
        return found

    def suspect_unprepared(self, view: PodView, reason: str) -> None:
        """Record a pod that its node has not prepared within the limit.

        Args:
            reason: Kubernetes' reason; empty if it gives none.
        """
        claims = f" (its ResourceClaims: {', '.join(view.claims)})" if view.claims else ""
        told = f"Pending: its node has not prepared it for {_PREPARATION_SECONDS:g} s{claims}"
        pod = self._pods.get(view.name)
        # The node may have prepared it while the reason was fetched.
        if pod is not None and pod.to_be_prepared_by is not None:
            self.suspect(view.name, f"{told}: {reason}" if reason else told)

    @property
    def next_unprepared(self) -> float | None:
        """Time of the next check of `unprepared`; None if no pod waits for its node."""
        return min((due for pod in self._pods.values() if (due := pod.to_be_prepared_by) is not None), default=None)

    def gone(self, view: PodView) -> None:
        """Remove a pod that is gone."""
        pod = self._pods.pop(view.name, None)
        if pod is not None:
            if view.problem:
                self._ended[view.name] = view.problem
                while len(self._ended) > _KEPT_PROBLEMS:
                    del self._ended[next(iter(self._ended))]
            self._enter(view.name, pod, "ended")
            self.on_change()

    def forget(self) -> None:
        """Stop keeping the book, because another driver does from now on."""
        for name, pod in list(self._pods.items()):
            self._enter(name, pod, "ended")
        self._pods.clear()

    # --- what requests tell ---

    def taken(self, instance: str) -> None:
        """Record that an instance has taken a request."""
        self.sending -= 1
        # A line may arrive before the watch has reported its pod.
        pod = self._pods.setdefault(instance, _Pod())
        pod.busy = True
        pod.proven = pod.view is None or not pod.view.ready
        if pod.fresh:
            pod.fresh = pod.asleep = False
        self._settle(instance, pod)
        self.on_change()

    def works(self, instance: str) -> None:
        """Record that a sleeping instance is awake and works."""
        pod = self._pods.get(instance)
        if pod is not None and pod.asleep:
            pod.asleep = False
            self._settle(instance, pod)

    def falls_asleep(self, instance: str) -> None:
        """Record that an instance was asked to release its slots' memory."""
        if (pod := self._pods.get(instance)) is not None:
            pod.falling_asleep, pod.fresh = True, False
            self._settle(instance, pod)

    def sleeps(self, instance: str) -> None:
        """Record that an instance has released its slots' memory."""
        if (pod := self._pods.get(instance)) is not None:
            pod.asleep, pod.falling_asleep = True, False
            self._settle(instance, pod)
            self.on_change()

    def starts_anew(self, instance: str) -> None:
        """Record that an instance's process has ended, and that another one follows in its pod."""
        if (pod := self._pods.get(instance)) is not None:
            pod.asleep = pod.falling_asleep = False
            self._enter(instance, pod, "starting")
            self._settle(instance, pod)

    def left(self, instance: str) -> None:
        """Record that an instance has finished a request, or published its partial results."""
        pod = self._pods.get(instance)
        if pod is not None and pod.busy:
            pod.busy = pod.asleep = False
            pod.idle_since = time.monotonic()
            if pod.view is None:
                # The watch may never report it. If it does, the pod is in the book again.
                del self._pods[instance]
                self._enter(instance, pod, "ended")
            else:
                self._settle(instance, pod)
        self.on_change()

    # --- what there is ---

    def free(self) -> list[str]:
        """Return the pods that are awake and have no task, the longest idle first."""
        return [name for name, pod in self._resting() if pod.state == "idle"]

    def asleep(self) -> list[str]:
        """Return the pods that sleep and could take a task, the longest idle first."""
        return [name for name, pod in self._resting() if pod.state == "asleep"]

    def is_asleep(self, instance: str) -> bool:
        """Return whether a pod sleeps. A pod that has never used its slots counts as asleep."""
        pod = self._pods.get(instance)
        return pod is None or (pod.asleep and not pod.busy)

    @property
    def usable(self) -> bool:
        """Whether any pod could take a task, at the latest when its turn comes."""
        return any(pod.kept and pod.view is not None and pod.view.ready for pod in self._pods.values())

    def leaving(self) -> list[str]:
        """Return the pods that are releasing their slots' memory, or terminating."""
        return [name for name, pod in self._pods.items() if pod.falling_asleep or pod.state == "draining"]

    def _resting(self) -> list[tuple[str, _Pod]]:
        ready = [(name, pod) for name, pod in self._pods.items() if pod.view and pod.view.ready and pod.kept]
        return sorted(ready, key=lambda entry: entry[1].idle_since)

    def situation(self) -> StageSituation:
        """Return the stage at this moment."""
        states = [pod.state for pod in self._pods.values()]
        resting = [pod for pod in self._pods.values() if pod.kept and pod.state not in ("starting", "busy")]
        return StageSituation(
            wanted=self.wanted,
            requests=self.requests if self.most is None else min(self.requests, self.most),
            sending=self.sending,
            starting=states.count("starting"),
            busy=sum(pod.busy for pod in self._pods.values()),
            idle_since=[pod.idle_since for pod in resting if not pod.busy],
        )

    @property
    def names(self) -> list[str]:
        """All pods, including terminating ones."""
        return list(self._pods)

    @property
    def starting(self) -> bool:
        """Whether a pod is starting."""
        return any(pod.state == "starting" for pod in self._pods.values())

    @property
    def there(self) -> int:
        """Number of pods that are not terminating."""
        return sum(pod.kept for pod in self._pods.values())

    def view(self, instance: str) -> PodView | None:
        """Return the watch's view of a pod."""
        pod = self._pods.get(instance)
        return pod.view if pod is not None else None

    def resting_since(self, instance: str) -> float:
        """End of a pod's last task, in monotonic seconds; 0 if it never had one."""
        return self._pods[instance].idle_since

    def idle_for(self, at: float) -> float:
        """Return the longest idle time of a pod, in seconds; 0 if no pod is idle."""
        return max((at - pod.idle_since for pod in self._pods.values() if pod.state == "idle"), default=0.0)

    def wrong_costs(self, due_before: float) -> Iterator[tuple[PodView, str | None]]:
        """Yield the pods with a wrong deletion cost, and the right one.

        It is highest for working pods, and higher for pods that are kept for now than for those idle since
        `due_before`.
        """
        for pod in self._pods.values():
            if pod.view is None or not pod.kept:
                continue
            kept = pod.state == "idle" and pod.idle_since > due_before
            cost = _COST_OF_WORK if pod.busy else _COST_OF_KEEPING if kept else None
            if pod.view.deletion_cost != cost:
                yield pod.view, cost

    def problem(self, instance: str | None = None) -> str:
        """Return the problem of a pod, or of the stage's pods; empty if none is known."""
        if instance is not None:
            pod = self._pods.get(instance)
            found = pod.problem if pod is not None and pod.view is not None else self._ended.get(instance, "")
            return f"{instance}: {found}" if found else ""
        problems = {name: pod.problem for name, pod in self._pods.items() if pod.problem}
        return "; ".join(f"{name}: {problem}" for name, problem in (problems or self._ended).items())

    def hopeless(self) -> bool:
        """Return whether there are pods and waiting fixes none of them."""
        views = [pod.view for pod in self._pods.values() if pod.kept]
        return bool(views) and all(view is not None and view.fatal for view in views)

    # --- states ---

    def _settle(self, name: str, pod: _Pod) -> None:
        """Set a pod's state from what is known about it."""
        view = pod.view
        state: InstanceState
        if self.begin_asleep and pod.state == "starting" and view is not None and view.ready:
            pod.asleep = pod.fresh = True
        if pod.busy:
            # Work during its grace period counts too.
            state = "switching" if pod.asleep else "busy"
        elif pod.falling_asleep:
            state = "switching"
        elif pod.asleep:
            # Also while it terminates: it holds nothing.
            state = "asleep"
        elif view is not None and view.deleting:
            state = "draining"
        elif view is not None and not view.ready and not pod.proven:
            state = "starting"
            if pod.starts_since is None:
                pod.starts_since = time.monotonic()
        else:
            state = "idle"
        if state in ("idle", "asleep") and pod.starts_since is not None:
            self.start_seconds, pod.starts_since = time.monotonic() - pod.starts_since, None
        if state != pod.state:
            if state == "idle" and pod.state == "starting":
                pod.idle_since = time.monotonic()
            self._enter(name, pod, state)

    def _enter(self, name: str, pod: _Pod, state: InstanceState, before: float = 0.0) -> None:
        pod.state = state
        self.on_state(StateChange(name, self.stage, state, time.monotonic() - before))
