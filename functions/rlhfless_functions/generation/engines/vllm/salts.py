"""Salts of vLLM's prefix cache: they decide which keys and values a request may use, if these outlive the weights that
computed them.

vLLM finds blocks by the tokens in them and by the request's salt (`cache_salt`). Each loaded version of the weights
gets a salt that was never used before, and all of its requests have it. A response that continues with newer weights
keeps the salt with which it began. So it finds its own blocks, and new samples never do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfless_functions.generation.engines.base import SequenceTask


@dataclass(frozen=True)
class RunSalts:
    """The salts of a run's requests; None if blocks never outlive their weights."""

    newest: str | None = None
    """Salt of responses that begin now."""
    unfinished: Mapping[int, str | None] = field(default_factory=dict)
    """Salts of responses that the run before left unfinished, by the seed of the sample."""

    def keeps(self, task: SequenceTask) -> bool:
        """Return whether a task continues a response of the run before. A task that begins anew does not."""
        return bool(task.response_tokens) and task.seed in self.unfinished

    def of(self, task: SequenceTask) -> str | None:
        """Return the salt of a request."""
        return self.unfinished[task.seed] if self.keeps(task) else self.newest


class CacheSalts:
    """The salts of one engine. There are none while the prefix cache is reset with every version."""

    def __init__(self) -> None:
        self._versions = 0
        self._unfinished: Mapping[int, str | None] = {}

    def next_version(self) -> None:
        """Record that other weights are loaded, and the keys and values of earlier ones are still there."""
        self._versions += 1

    def left(self, unfinished: Mapping[int, str | None]) -> None:
        """Record the unfinished responses of a run that has ended: their salts by the seed of the sample."""
        self._unfinished = unfinished

    def of_run(self, *, keep: bool) -> RunSalts:
        """Return the salts of the next run.

        Args:
            keep: whether it continues responses of the last run. No later run does.
        """
        unfinished, self._unfinished = self._unfinished, {}
        return RunSalts(str(self._versions) if self._versions else None, unfinished if keep else {})


class KeptBlocks:
    """Counts the kept tokens of a run's continued responses."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], int] = {}
        self._prompts: dict[int, int] = {}

    def found(self, task: SequenceTask, tokens: int) -> None:
        """Record that a response continued with the keys and values of its first tokens, the prompt's first."""
        if tokens:
            prompt = min(tokens, len(task.prompt_tokens))
            self._prompts[task.prompt] = max(prompt, self._prompts.get(task.prompt, 0))
            self._tokens[task.prompt, task.index] = tokens - prompt

    def counted(self) -> dict[str, int]:
        """Return the counts, as fields of `DecodeCounts`."""
        tokens = sum(self._prompts.values()) + sum(self._tokens.values())
        return {"kept_tokens": tokens, "kept_responses": len(self._tokens)}
