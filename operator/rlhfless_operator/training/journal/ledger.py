"""The ledger: instance-seconds by state, and money, per stage and step."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Self

from rlhfless_functions.api import Stage
from rlhfless_operator.job.charged import CHARGED, Charged
from rlhfless_operator.platforms.base import InstanceState, StateChange
from rlhfless_operator.records.record import CHARGED_STATES, KEPT_STATES, KeptState, StageAccount


@dataclass(frozen=True)
class Span:
    """A period of an instance in one state, from `start` to `end` in monotonic seconds."""

    instance: str
    stage: Charged
    state: KeptState
    start: float
    end: float


@dataclass
class Account:
    """Instance-seconds by stage and state, including sleep."""

    seconds: dict[tuple[Charged, KeptState], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: "Account") -> None:
        """Add another account's seconds."""
        for key, seconds in other.seconds.items():
            self.seconds[key] += seconds

    @classmethod
    def of(cls, seconds: Mapping[str, Mapping[str, float]]) -> Self:
        """Return the account of a status: instance-seconds by stage, and within it by state."""
        account = cls()
        for stage in CHARGED:
            for state in KEPT_STATES:
                account.seconds[stage, state] += seconds.get(stage, {}).get(state, 0.0)
        return account

    def as_status(self) -> dict[str, dict[str, float]]:
        """Return the account for a status, without zeros."""
        stages: dict[str, dict[str, float]] = {}
        for (stage, state), seconds in self.seconds.items():
            if seconds:
                stages.setdefault(stage, {})[state] = seconds
        return stages

    def total(self, stage: Charged | None = None, state: KeptState | None = None) -> float:
        """Return the instance-seconds of one stage or all, in one state or in all that are charged."""
        states = CHARGED_STATES if state is None else (state,)
        return sum(
            seconds
            for (of_stage, of_state), seconds in self.seconds.items()
            if stage in (None, of_stage) and of_state in states
        )

    def cost(self, prices: Mapping[Charged, Decimal], stage: Charged | None = None) -> Decimal:
        """Return the money of one stage or all, to a millionth.

        Args:
            prices: of an hour of an instance of each stage.
        """
        stages = prices if stage is None else (stage,)
        costs = (Decimal(repr(self.total(each))) / 3600 * prices[each] for each in stages)
        return sum(costs, Decimal(0)).quantize(Decimal("0.000001"))

    def gpu_seconds(self, gpus: Mapping[Stage, int]) -> float:
        """Return the GPU-seconds of the states that are charged.

        Args:
            gpus: of an instance of each stage.
        """
        return sum(gpus[stage] * self.total(stage) for stage in gpus)

    def by_stage(self, prices: Mapping[Charged, Decimal]) -> dict[Charged, StageAccount]:
        """Return one account a stage, as in `metrics.jsonl`."""
        return {
            stage: StageAccount(
                **{state: round(self.total(stage, state), 6) for state in KEPT_STATES},
                cost=self.cost(prices, stage),
            )
            for stage in prices
        }


class Ledger:
    """Accounts for every instance from its request until it is gone."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Charged, KeptState, float]] = {}
        self._account = Account()
        self._spans: list[Span] = []
        self._longest_idle: dict[Charged, float] = {}

    def observe(self, change: StateChange) -> None:
        """Note an instance's change of state."""
        self._charge(change.instance, change.at)
        if change.state == "ended":
            self._open.pop(change.instance, None)
        else:
            self._open[change.instance] = (change.stage, change.state, change.at)

    def close(self, now: float) -> Account:
        """End the account at `now` and begin the next. Instances that live on are split at this moment."""
        for instance, (stage, state, _) in list(self._open.items()):
            self._charge(instance, now)
            self._open[instance] = (stage, state, now)
        account, self._account = self._account, Account()
        return account

    def running(self, now: float) -> Account:
        """Return the open account with living instances charged up to `now`. Nothing is closed."""
        account = Account()
        account.add(self._account)
        for stage, state, since in self._open.values():
            account.seconds[stage, state] += max(0.0, now - since)
        return account

    def take_spans(self) -> list[Span]:
        """Return the spans that have ended since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def take_longest_idle(self) -> dict[Charged, float]:
        """Return the longest seconds that an instance of each stage was idle at a stretch since the last call."""
        longest, self._longest_idle = self._longest_idle, {}
        return longest

    def instances(self) -> dict[tuple[Charged, InstanceState], int]:
        """Return the number of instances in each state now."""
        counts: dict[tuple[Charged, InstanceState], int] = defaultdict(int)
        for stage, state, _ in self._open.values():
            counts[stage, state] += 1
        return counts

    def _charge(self, instance: str, until: float) -> None:
        if instance not in self._open:
            return
        stage, state, since = self._open[instance]
        if until > since:
            self._account.seconds[stage, state] += until - since
            self._spans.append(Span(instance, stage, state, since, until))
            if state == "idle":
                self._longest_idle[stage] = max(self._longest_idle.get(stage, 0.0), until - since)
