"""The environment of the example: a counter that only its two tools change, in the form of TRL's environments."""


class Counter:
    """A counter. An episode is solved if it ends at the right number."""

    def reset(self, start: int, ground_truth: int, **row: object) -> str:
        """Begin an episode with the columns of a row; the text is added to the user's message."""
        self.total = start
        self.goal = ground_truth
        return f"={self.total}"

    def add(self, amount: int) -> str:
        """Add to the counter.

        Args:
            amount: the number to add.
        """
        self.total += amount
        return str(self.total)

    def take(self, amount: int) -> str:
        """Take from the counter.

        Args:
            amount: the number to take away.
        """
        self.total -= amount
        return str(self.total)

    def get_reward(self) -> float:
        """Return the reward of the episode."""
        return float(self.total == self.goal)
