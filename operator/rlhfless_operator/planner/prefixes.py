"""The prefill of a step: a block-aligned trie of its prompts says which actor computes what, and what is sent instead.

Keys and values are reused in whole blocks. So a prompt is a chain of blocks, and each block is named by a hash of all
tokens up to its end. Equal names are equal prefixes: the trie is the set of names, and its nodes are the tokens to
prefill. The planner sees names and counts, never tokens.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

Block = int
"""Name of a prefix that ends with a whole block."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt as the planner sees it."""

    blocks: tuple[Block, ...]
    """Names of its whole blocks, first to last."""
    rest: int
    """Tokens after the last whole block, which are never shared between prompts."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A prefix that an actor is sent instead of computing it."""

    source: str
    """Actor that computes it."""
    block: Block
    """Name of its last block."""
    tokens: int


@dataclass(frozen=True)
class PrefixPlan:
    """The prefixes that each actor computes, and those that it is sent."""

    alone_tokens: Mapping[str, int]
    """Prompt tokens that each actor would compute if nothing were sent."""
    prefill_tokens: Mapping[str, int]
    """Prompt tokens that each actor computes."""
    fetches: Mapping[str, tuple[Fetch, ...]]
    """Prefixes that each actor is sent; actors that are sent none are left out."""
    saved_seconds: float
    """Instance-seconds saved against a plan that sends nothing."""


def prefill_tokens(prompts: Sequence[PromptBlocks], block_tokens: int) -> int:
    """Return the tokens that one instance computes for all of `prompts`: the nodes of their trie."""
    return block_tokens * len({block for prompt in prompts for block in prompt.blocks}) + sum(
        prompt.rest for prompt in prompts
    )


def plan_prefixes(
    actors: Mapping[str, Sequence[PromptBlocks]],
    *,
    block_tokens: int,
    prefill_token_seconds: float,
    transfer_token_seconds: float,
    transfer_seconds: float,
    split: bool = False,
) -> PrefixPlan:
    """Choose the prefixes that one actor computes and sends to the others.

    If several actors need a prefix, the one that needs most of it computes it. Among equals it is the one with the
    least to compute so far. Another actor is sent its longest shared prefix if that takes less time than to compute it.
    One actor computes all prefixes with the same first block. With `split`, each actor computes their common part, and
    several actors divide the rest.

    Args:
        actors: the prompts of each actor's share.
        prefill_token_seconds: to compute a token.
        transfer_token_seconds: to send a token's keys and values.
        transfer_seconds: to send anything at all.
        split: whether prefixes with a common beginning may be computed by several actors.
    """
    common = _forks(actors) if split else set()
    owner = _owners(actors, common)
    alone = {name: prefill_tokens(prompts, block_tokens) for name, prompts in actors.items()}
    computed = dict(alone)
    fetches: dict[str, tuple[Fetch, ...]] = {}
    saved = 0.0
    for name, prompts in actors.items():
        sent: dict[tuple[str, Block], set[Block]] = {}
        for prompt in prompts:
            shared = _shared_prefix(prompt, name, owner, common)
            if shared:
                sent.setdefault((owner[shared[-1]], shared[-1]), set()).update(shared)
        # Every actor computes the common blocks itself.
        held: set[Block] = set(common)
        chosen = []
        for (source, last), blocks in sorted(sent.items(), key=lambda each: (-len(each[1]), each[0])):
            tokens = block_tokens * len(blocks - held)
            gain = tokens * prefill_token_seconds - len(blocks) * block_tokens * transfer_token_seconds
            if gain > transfer_seconds:
                chosen.append(Fetch(source, last, block_tokens * len(blocks)))
                held |= blocks
                computed[name] -= tokens
                saved += gain - transfer_seconds
        if chosen:
            fetches[name] = tuple(chosen)
    return PrefixPlan(alone, computed, fetches, saved)


def expected_gain(
    plan: PrefixPlan,
    *,
    prefill_token_seconds: float,
    send_token_seconds: float,
    transfer_token_seconds: float,
    transfer_seconds: float,
) -> float:
    """Return the instance-seconds by which a plan's actors end their prompts earlier; negative if they end them later.

    `saved_seconds` counts work. This function counts the time for which instances are held: all actors begin at once,
    each on a device of its own, and an actor that waits for a prefix costs as much as one that computes. A source
    sends a prefix, at the latest, after it has computed all of its own prompts; this moment is assumed. So nothing is
    gained if all actors wait for one of them, as with a system prompt that all prompts share.

    Args:
        plan: the plan.
        prefill_token_seconds: to compute a token.
        send_token_seconds: for a source to send a token's keys and values.
        transfer_token_seconds: for another actor to fetch them.
        transfer_seconds: to fetch anything at all.
    """
    sent = {(fetch.source, fetch.block): fetch.tokens for fetches in plan.fetches.values() for fetch in fetches}
    done = {name: tokens * prefill_token_seconds for name, tokens in plan.prefill_tokens.items()}
    for (source, _), tokens in sent.items():
        done[source] += tokens * send_token_seconds
    gain = 0.0
    for name, tokens in plan.alone_tokens.items():
        fetches = plan.fetches.get(name, ())
        ready = max((done[fetch.source] for fetch in fetches), default=0.0)
        fetching = sum(fetch.tokens * transfer_token_seconds + transfer_seconds for fetch in fetches)
        gain += tokens * prefill_token_seconds - (max(done[name], ready) + fetching)
    return gain


def _forks(actors: Mapping[str, Sequence[PromptBlocks]]) -> set[Block]:
    """Return the blocks at which shared prefixes part, with all blocks before them.

    At such a block at least two prefixes go on, each of which more than one actor needs.
    """
    needed: dict[Block, set[str]] = {}
    following: dict[Block, set[Block]] = {}
    for name, prompts in actors.items():
        for prompt in prompts:
            for block in prompt.blocks:
                needed.setdefault(block, set()).add(name)
            for block, after in pairwise(prompt.blocks):
                following.setdefault(block, set()).add(after)
    forks = {block for block, found in following.items() if sum(len(needed[each]) > 1 for each in found) > 1}
    common: set[Block] = set()
    for prompt in (prompt for prompts in actors.values() for prompt in prompts):
        last = max((number for number, block in enumerate(prompt.blocks, start=1) if block in forks), default=0)
        common.update(prompt.blocks[:last])
    return common


def _owners(actors: Mapping[str, Sequence[PromptBlocks]], common: Set[Block]) -> dict[Hashable, str]:
    """Return the actor that computes each block for the others. Common blocks have none.

    Trees are dealt one by one, the largest first.
    """
    trees: dict[Block, dict[str, set[Block]]] = {}
    for name, prompts in actors.items():
        for prompt in prompts:
            blocks = [block for block in prompt.blocks if block not in common]
            if blocks:
                trees.setdefault(blocks[0], {}).setdefault(name, set()).update(blocks)
    load = dict.fromkeys(actors, 0)
    owner: dict[Hashable, str] = {}
    for _, needed in sorted(trees.items(), key=lambda tree: (-max(map(len, tree[1].values())), tree[0])):
        for name in sorted(needed, key=lambda each: (-len(needed[each]), load[each], each)):
            mine = needed[name] - owner.keys()
            load[name] += len(mine)
            owner |= dict.fromkeys(mine, name)
    return owner


def _shared_prefix(prompt: PromptBlocks, name: str, owner: Mapping[Hashable, str], common: Set[Block]) -> list[Block]:
    """Return the leading blocks of a prompt that one other actor computes, with the common blocks before them."""
    first = next((number for number, block in enumerate(prompt.blocks) if block not in common), None)
    if first is None or owner[prompt.blocks[first]] == name:
        return []
    source = owner[prompt.blocks[first]]
    shared = list(prompt.blocks[:first])
    for block in prompt.blocks[first:]:
        if owner[block] != source:
            break
        shared.append(block)
    return shared
