"""Prompts cut into named blocks, as the planner of prefixes takes them."""

import hashlib
from array import array
from collections.abc import Sequence

from rlhfless_operator.planner.prefixes import PromptBlocks


def name_blocks(tokens: Sequence[int], block_tokens: int) -> PromptBlocks:
    """Cut a prompt into blocks of `block_tokens` and name them.

    The last token always has to be computed, for its logits. So a prompt that ends with a block keeps it as rest.
    """
    whole = max(0, (len(tokens) - 1) // block_tokens)
    digest = hashlib.blake2b(digest_size=8)
    names = []
    for k in range(whole):
        digest.update(array("q", tokens[k * block_tokens : (k + 1) * block_tokens]).tobytes())
        names.append(int.from_bytes(digest.digest()))
    return PromptBlocks(tuple(names), len(tokens) - whole * block_tokens)
