"""Which keys and values of vLLM's prefix cache a request may use, where they outlive the weights that computed them.

vLLM finds blocks by the tokens in them and by the request's salt (`cache_salt`). Each version of the weights that is
loaded gets a salt that was never used before, and all of its requests have it. A response that goes on with newer
weights keeps the salt that it began with: so it finds its own blocks, and new samples never do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfless_functions.generation.engines.base import SequenceTask


@dataclass(frozen=True)
class RunSalts:
    """The salts of a run's requests; None if blocks never outlive their weights."""

    newest: str | None = None
    """Of responses that begin now."""
    unfinished: Mapping[int, str | None] = field(default_factory=dict)
    """Of responses that the run before left unfinished, by the seed of the sample."""

    def keeps(self, task: SequenceTask) -> bool:
        """Whether a task goes on with what the run before left. One that begins anew does not."""
        return bool(task.response_tokens) and task.seed in self.unfinished

    def of(self, task: SequenceTask) -> str | None:
        """The salt of a request."""
        return self.unfinished[task.seed] if self.keeps(task) else self.newest


class CacheSalts:
    """The salts of one engine. There are none as long as the prefix cache is reset with every version."""

    def __init__(self) -> None:
        self._versions = 0
        self._unfinished: Mapping[int, str | None] = {}

    def next_version(self) -> None:
        """Other weights are loaded, and the keys and values of earlier ones are still there."""
        self._versions += 1

    def left(self, unfinished: Mapping[int, str | None]) -> None:
        """A run has ended with these unfinished responses: their salts by the seed of the sample."""
        self._unfinished = unfinished

    def of_run(self, *, keep: bool) -> RunSalts:
        """The salts of the next run.

        Args:
            keep: whether it goes on with what the last one left. No later run does.
        """
        unfinished, self._unfinished = self._unfinished, {}
        return RunSalts(str(self._versions) if self._versions else None, unfinished if keep else {})


class KeptBlocks:
    """Counts what a run's continued responses have found."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], int] = {}
        self._prompts: dict[int, int] = {}

    def found(self, task: SequenceTask, tokens: int) -> None:
        """A response went on with the keys and values of its first tokens, of which the prompt's come first."""
        if tokens:
            prompt = min(tokens, len(task.prompt_tokens))
            self._prompts[task.prompt] = max(prompt, self._prompts.get(task.prompt, 0))
            self._tokens[task.prompt, task.index] = tokens - prompt

    def counted(self) -> dict[str, int]:
        """The counts of `DecodeCounts`."""
        tokens = sum(self._prompts.values()) + sum(self._tokens.values())
        return {"kept_tokens": tokens, "kept_responses": len(self._tokens)}
