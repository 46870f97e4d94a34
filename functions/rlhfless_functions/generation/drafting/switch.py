"""Switch drafting by its measured costs and savings: off if it does not save time, with rare retries."""

from dataclasses import dataclass

TRIAL_PASSES = 16
"""Passes after which a balance is drawn."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024
"""Passes without drafting after a balance that was negative: twice as many after each in a row."""
_FORGET = 0.95
MOST_SEQUENCES = {"cpu": 7}
"""Most sequences of a pass that may draft, by device. In a batch that drains only tokens of the longest responses save
passes. Those of others save a row, and a drafted row costs as much on a CPU. Measured by benchmarks/drafting/steps.py.
"""


@dataclass
class _Account:
    balance: float = 0.0
    passes: int = 0
    pause: int = FIRST_PAUSE
    left: int = 0


class Switch:
    """Counts passes, seconds that drafting took, and seconds that it saved, apart for batches of 1, 2 to 3, 4 to 7 and
    so on: drafts that do not pay in a full batch do so in its tail. It outlives runs.

    Args:
        device: its type, which tells the largest batch that drafts.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._accounts: dict[int, _Account] = {}

    def on(self, sequences: int) -> bool:
        """Whether a pass of so many may draft; to be asked once for each pass."""
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
        """A pass was made for which drafting was on.

        Args:
            sequences: of the pass.
            saved: seconds that the tokens which it brought would have taken otherwise.
            cost: seconds that it took for drafting.
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
