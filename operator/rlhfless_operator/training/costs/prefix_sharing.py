"""The beginnings of prompts that one of a step's actors computes for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_functions.api import SampleTask, SharedPrefix, SharedPrefixes
from rlhfless_operator.planner.prefixes import PrefixPlan, PromptBlocks, expected_gain, plan_prefixes

PATIENCE, PATIENCE_SECONDS = 2.0, 5.0
"""An actor waits this many times as long as all prompts of the busiest actor should take, and this much longer."""


@dataclass(frozen=True)
class Way:
    """The way of keys and values from one actor to another, with its cost before it is measured."""

    unknown_share: float
    """Cost of sending a token and of fetching it, each as a share of the time of computing it."""
    transfer_seconds: float
    """Seconds to fetch anything at all."""


FOLDER = Way(unknown_share=0.1, transfer_seconds=0.001)
"""A folder that the instances share."""
STORE = Way(unknown_share=0.5, transfer_seconds=0.1)
"""An object store. A reader looks for a prefix ten times a second."""


@dataclass(frozen=True)
class TokenSeconds:
    """Seconds that a token of a prompt takes."""

    prefill: float
    """Seconds to compute it."""
    send: float
    """Seconds until an instance has sent its keys and values."""
    fetch: float
    """Seconds until another instance has fetched them."""


class PrefixSharing:
    """The prefixes that a step's actors share. Actors are named as in requests.

    Args:
        tree: a dataset's, as its index has it (`rlhfless_functions.data.prefix_tree`).
        shares: of the plan, the actors' in the order of their numbers.
        prompt_tokens: of every prompt of the dataset, by row.
        seconds: times of a token.
        transfer_seconds: time to fetch anything at all.
        always: whether to share a prefix even if sending it takes longer than computing it.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        shares: Sequence[Sequence[SampleTask]],
        prompt_tokens: Sequence[int],
        seconds: TokenSeconds,
        transfer_seconds: float = FOLDER.transfer_seconds,
        *,
        always: bool = False,
    ) -> None:
        block_tokens = int(tree["block_tokens"])
        prompts = {sample.prompt for share in shares for sample in share}
        blocks = {row: _blocks(tree, row, prompt_tokens[row]) for row in prompts}
        rows = {_name(number): {sample.prompt for sample in share} for number, share in enumerate(shares)}
        held = {name: [blocks[row] for row in sorted(of)] for name, of in rows.items()}

        def gain(plan: PrefixPlan) -> float:
            return expected_gain(
                plan,
                prefill_token_seconds=seconds.prefill,
                send_token_seconds=seconds.send,
                transfer_token_seconds=seconds.fetch,
                transfer_seconds=transfer_seconds,
            )

        plans = [
            plan_prefixes(
                held,
                block_tokens=block_tokens,
                prefill_token_seconds=seconds.prefill,
                transfer_token_seconds=0.0 if always else seconds.fetch,
                transfer_seconds=0.0 if always else transfer_seconds,
                split=split,
            )
            for split in (False, True)
        ]
        plan = max(plans, key=gain)
        self.alone_seconds = sum(plan.alone_tokens.values()) * seconds.prefill
        """Instance-seconds that the prompts take if nothing is shared."""
        self.gain_seconds = gain(plan)
        """Instance-seconds by which the actors are expected to finish their prompts earlier."""
        sources = {fetch.block: fetch.source for fetches in plan.fetches.values() for fetch in fetches}
        units = {row: _deepest(blocks[row], sources) for row in prompts}
        # Each beginning of a prompt is sent once. A block that ends no prompt of its source is not sent at all.
        sent = {unit for row, unit in units.items() if unit is not None and row in rows[sources[unit[0]]]}
        self._units = {
            row: (unit[1] * block_tokens, sources[unit[0]])
            for row, unit in units.items()
            if unit is not None and unit in sent
        }

        # By then the actor that computes most has computed it, if its instance began with the others.
        busiest = max(plan.prefill_tokens.values()) * (seconds.prefill + seconds.send + seconds.fetch)
        self._wait_seconds = PATIENCE_SECONDS + PATIENCE * busiest

    def of(self, actor: str, samples: Sequence[SampleTask], folder: str) -> SharedPrefixes | None:
        """Return the prefixes for a request of an actor, even if samples were moved to it; None if it shares none."""
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
    """Return the last of a prompt's blocks that any actor sends, and how many blocks end with it."""
    found = [(block, number) for number, block in enumerate(prompt.blocks, start=1) if block in sources]
    return found[-1] if found else None
