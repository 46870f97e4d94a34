"""Which beginnings of prompts are computed by one of a step's actors for all."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_functions.api import SampleTask, SharedPrefix, SharedPrefixes
from rlhfless_operator.planner.prefixes import PromptBlocks, plan_prefixes

UNKNOWN_TRANSFER_SHARE = 0.1
"""Of the time that computing a token takes: what its keys and values are thought to take on their way, at first."""
TRANSFER_SECONDS = 0.001
"""What it takes to send anything at all, thought to be."""

PATIENCE, PATIENCE_SECONDS = 2.0, 5.0
"""An actor waits so many times as long as all of the busiest actor's prompts should take, and so much longer."""


class PrefixSharing:
    """What a step's actors share, by the names of actors as requests have them.

    Args:
        tree: a dataset's, as its index has it (`rlhfless_functions.data.prefix_tree`).
        shares: of the plan, the actors' in the order of their numbers.
        prompt_tokens: of every prompt of the dataset, by row.
        prefill_token_seconds: that an instance takes to compute a token.
        transfer_token_seconds: that sending its keys and values takes.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        shares: Sequence[Sequence[SampleTask]],
        prompt_tokens: Sequence[int],
        prefill_token_seconds: float,
        transfer_token_seconds: float,
    ) -> None:
        block_tokens = int(tree["block_tokens"])
        prompts = {sample.prompt for share in shares for sample in share}
        blocks = {row: _blocks(tree, row, prompt_tokens[row]) for row in prompts}
        rows = {_name(number): {sample.prompt for sample in share} for number, share in enumerate(shares)}
        plan = plan_prefixes(
            {name: [blocks[row] for row in sorted(held)] for name, held in rows.items()},
            block_tokens=block_tokens,
            prefill_token_seconds=prefill_token_seconds,
            transfer_token_seconds=transfer_token_seconds,
            transfer_seconds=TRANSFER_SECONDS,
        )
        sources = {fetch.block: fetch.source for fetches in plan.fetches.values() for fetch in fetches}
        units = {row: _deepest(blocks[row], sources) for row in prompts}
        # One beginning of a prompt is sent. What no prompt of its source ends with is not sent at all.
        sent = {unit for row, unit in units.items() if unit is not None and row in rows[sources[unit[0]]]}
        self._units = {
            row: (unit[1] * block_tokens, sources[unit[0]])
            for row, unit in units.items()
            if unit is not None and unit in sent
        }

        # By then the actor that computes most has computed it, if its instance began with the others.
        busiest = max(plan.prefill_tokens.values()) * prefill_token_seconds
        self._wait_seconds = PATIENCE_SECONDS + PATIENCE * busiest

    def of(self, actor: str, samples: Sequence[SampleTask], folder: str) -> SharedPrefixes | None:
        """What a request of an actor says, even if samples were moved to it; None if it has nothing in common."""
        found = ((row, self._units.get(row)) for row in dict.fromkeys(sample.prompt for sample in samples))
        prefixes = [
            SharedPrefix(prompt=row, tokens=unit[0], source=unit[1] == actor) for row, unit in found if unit is not None
        ]
        return SharedPrefixes(folder=folder, prefixes=prefixes, wait_seconds=self._wait_seconds) if prefixes else None


def _name(number: int) -> str:
    return f"actor-{number:04d}"


def _blocks(tree: Mapping[str, Any], row: int, tokens: int) -> PromptBlocks:
    names: list[int] = []
    node = tree["nodes"][row]
    while node >= 0:
        names.append(node)
        node = tree["parents"][node]
    return PromptBlocks(tuple(reversed(names)), tokens - len(names) * int(tree["block_tokens"]))


def _deepest(prompt: PromptBlocks, sources: Mapping[int, str]) -> tuple[int, int] | None:
    """The last of a prompt's blocks that is sent to anybody, and how many blocks end with it."""
    found = [(block, number) for number, block in enumerate(prompt.blocks, start=1) if block in sources]
    return found[-1] if found else None
