"""A ledger by which each step costs the same, however fast the machine is: for tests of what a budget does."""

import pytest

from rlhfless_operator.training import step_journal
from rlhfless_operator.training.ledger import Account, Ledger

STEP_SECONDS = 10.0


class SteadyLedger(Ledger):
    """Charges ten seconds of learning for a time in which something was generated, and nothing for any other."""

    def close(self, now: float) -> Account:
        """The account of a step."""
        return _steady(super().close(now))

    def running(self, now: float) -> Account:
        """The account of the step under way."""
        return _steady(super().running(now))


def _steady(account: Account) -> Account:
    steady = Account()
    if account.total("generation", "busy"):
        steady.seconds["learning", "busy"] = STEP_SECONDS
    return steady


@pytest.fixture
def steady_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of every job costs the same."""
    monkeypatch.setattr(step_journal, "Ledger", SteadyLedger)
