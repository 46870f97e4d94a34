"""A ledger by which each step costs the same, however fast the machine is: for tests of what a budget does."""

from typing import ClassVar

import pytest

from rlhfless_functions.api import Stage
from rlhfless_operator.training.journal import step_journal
from rlhfless_operator.training.journal.ledger import Account, Ledger

STEP_SECONDS = 10.0


class SteadyLedger(Ledger):
    """Charges ten seconds of learning for a time in which a stage was at work, and nothing for any other."""

    stage: ClassVar[Stage] = "generation"

    def close(self, now: float) -> Account:
        """The account of a step."""
        return self._steady(super().close(now))

    def running(self, now: float) -> Account:
        """The account of the step under way."""
        return self._steady(super().running(now))

    def _steady(self, account: Account) -> Account:
        steady = Account()
        if account.total(self.stage, "busy"):
            steady.seconds["learning", "busy"] = STEP_SECONDS
        return steady


class SteadyLearning(SteadyLedger):
    """The same where steps are generated ahead: each learns in its own time."""

    stage = "learning"


@pytest.fixture
def steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of every job costs the same."""
    monkeypatch.setattr(step_journal, "Ledger", SteadyLedger)


@pytest.fixture
def steady_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of an asynchronous job costs the same."""
    monkeypatch.setattr(step_journal, "Ledger", SteadyLearning)
