"""How the prompts of a dataset begin alike, told without any of their tokens.

The control plane decides from it which beginnings are computed once for several actors.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict

PREFIX_BLOCK_TOKENS = 128
"""Tokens of a block: a multiple of those that engines keep keys and values in."""


class PrefixTree(TypedDict):
    """The trie of what at least two prompts have in common, in whole blocks."""

    block_tokens: int
    parents: list[int]
    """Of each node; -1 for a first block."""
    nodes: list[int]
    """Each prompt's deepest node; -1 for one that begins like no other."""


def prefix_tree(prompts: Sequence[Sequence[int]], block_tokens: int = PREFIX_BLOCK_TOKENS) -> PrefixTree | None:
    """The tree of some prompts' tokens; None if no two begin alike.

    A prompt's last token is in no block: it always has to be computed, for its logits.
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
