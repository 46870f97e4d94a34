"""The responses to one prompt, which a reward scores. Workers import this, so it uses only the standard library."""

from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
"""A chat message with `role` and `content`."""


@dataclass(frozen=True)
class Progress:
    """The position of the training when a reward is called, as TRL counts it."""

    finished: int = 0
    """Steps that are finished."""
    total: int = 1
    """Steps of the whole job."""
    epoch: float = 0.0
    """Passes over the training prompts that are finished."""
    epochs: int = 1
    """Passes of the whole job, the last one perhaps a part."""


START = Progress()


@dataclass(frozen=True)
class RewardGroup:
    """All responses to one prompt, the unit of a call. So chunks of the work do not change the scores."""

    prompt: int
    """Row of the prompt in the materialised dataset."""
    text: str
    """The prompt as the model saw it, chat template applied."""
    messages: list[Message] | None
    """The prompt as chat messages, if the data has them."""
    completions: list[str]
    """The responses decoded, without special tokens."""
    completion_ids: list[list[int]]
    """The responses' token ids, EOS included."""
    finish_reasons: list[str]
    """The reason for the end of each response: `stop` or `truncated`."""
    columns: dict[str, Any]
    """The prompt's row of the dataset, and `ground_truth` if there is one."""
    conversations: list[list[Message]] | None = None
    """The responses as messages, if they have several turns in an environment."""
    episode_scores: list[float | None] | None = None
    """The scores that the environment gave."""
    dropped: list[bool] | None = None
    """Whether no reward may score a response, because its environment failed."""

    @property
    def size(self) -> int:
        """Number of responses."""
        return len(self.completions)

    def ended(self) -> list[int]:
        """Return the numbers of the responses that ended by themselves."""
        return [number for number, reason in enumerate(self.finish_reasons) if reason != "truncated"]

    def alone(self, number: int) -> "RewardGroup":
        """Return the same prompt with one of its responses."""
        return replace(
            self,
            completions=[self.completions[number]],
            completion_ids=[self.completion_ids[number]],
            finish_reasons=[self.finish_reasons[number]],
            conversations=self.conversations and [self.conversations[number]],
            episode_scores=self.episode_scores and [self.episode_scores[number]],
            dropped=self.dropped and [self.dropped[number]],
        )

    @property
    def ground_truth(self) -> Any:
        """The reference answer.

        Raises:
            LookupError: if the data has none.
        """
        value = self.columns.get("ground_truth")
        if value is None:
            raise LookupError(
                f"row {self.prompt} has no ground truth; name its column with data.groundTruthColumn"
                f" (the columns are {', '.join(sorted(self.columns.keys() - {'ground_truth'})) or 'none'})"
            )
        return value
