"""Switches drafting by its measured costs and savings: off if it does not save time, with rare retries."""

from dataclasses import dataclass

TRIAL_PASSES = 16
"""Passes after which the balance counts."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Passes without drafting after a negative balance. Each further negative balance in a row doubles them."""
_FORGET = 0.95
MOST_SEQUENCES = {"cpu": 7}
"""Most sequences of a pass that may draft, by device. In a batch that drains, only tokens of the longest responses save
passes. Tokens of the others save a row, and a drafted row costs as much on a CPU. Measured by
benchmarks/drafting/steps.py."""


@dataclass
class _Account:
    balance: float = 0.0
    passes: int = 0
    pause: int = FIRST_PAUSE
    left: int = 0


class Switch:
    """Decides whether to draft, from counted passes, the seconds that drafting took, and those that it saved.

    Batches of 1, 2 to 3, 4 to 7 sequences and so on count separately: drafts that do not pay in a full batch may pay in
    its tail. The counts outlive runs.

    Args:
        device: type of the device, which determines the largest batch that drafts.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._accounts: dict[int, _Account] = {}

    def on(self, sequences: int) -> bool:
        """Return whether a pass of so many sequences may draft. Ask once for each pass."""
        if sequences > MOST_SEQUENCES.get(self._device, sequences):
            return False
        account = self._account(sequences)
        if account.left == 0:
            return True
        account.left -= 1
        if account.left == 0:
            account.balance, account.passes = 0.0, 0
        return False

    def drafted(self, sequences: int, saved: float, cost: float) -> None:
        """Count a pass for which drafting was on.

        Args:
            sequences: sequences in the pass.
            saved: seconds that its additional tokens would have taken without drafts.
            cost: seconds that drafting took.
        """
        account = self._account(sequences)
        account.balance = account.balance * _FORGET + saved - cost
        account.passes += 1
        if account.passes < TRIAL_PASSES:
            return
        if account.balance < 0:
            account.left = account.pause
            account.pause = min(2 * account.pause, LONGEST_PAUSE)
        else:
            account.pause = FIRST_PAUSE

    def _account(self, sequences: int) -> _Account:
        return self._accounts.setdefault(sequences.bit_length(), _Account())
