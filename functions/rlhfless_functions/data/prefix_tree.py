"""The common prefixes of a dataset's prompts, without their tokens.

The control plane uses it to decide which prefixes to compute once for several actors.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict

PREFIX_BLOCK_TOKENS = 128
"""Tokens of a block: a multiple of engines' block sizes for keys and values."""


class PrefixTree(TypedDict):
    """The trie of prefixes that at least two prompts share, in whole blocks."""

    block_tokens: int
    parents: list[int]
    """Parent of each node; -1 for a first block."""
    nodes: list[int]
    """Each prompt's deepest node; -1 for a prompt without a shared prefix."""


def prefix_tree(prompts: Sequence[Sequence[int]], block_tokens: int = PREFIX_BLOCK_TOKENS) -> PrefixTree | None:
    """Return the tree of prompts' tokens; None if no two share a prefix.

    A prompt's last token is in no block, because it must always be computed for its logits.
    """
    parents: list[int] = []
    nodes = [-1] * len(prompts)
    level: list[tuple[int, Sequence[int]]] = [(-1, range(len(prompts)))]
    begin = 0
    while level:
        deeper: list[tuple[int, Sequence[int]]] = []
        for parent, rows in level:
            alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for row in rows:
                if len(prompts[row]) > begin + block_tokens:
                    alike[tuple(prompts[row][begin : begin + block_tokens])].append(row)
            for found in alike.values():
                if len(found) > 1:
                    deeper.append((len(parents), found))
                    for row in found:
                        nodes[row] = len(parents)
                    parents.append(parent)
        level, begin = deeper, begin + block_tokens
    return {"block_tokens": block_tokens, "parents": parents, "nodes": nodes} if parents else None
