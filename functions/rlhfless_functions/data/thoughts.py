"""The thoughts that a prompt begins for the model: `<think>` at its end.

This module is light, because reward workers import it.
"""

import re

_BEGUN = re.compile(
    r"(<(?:think|thinking|thought|thoughts|reasoning|reason|seed:think)>|◁think▷|<\|begin_of_thought\|>|\[THINK\])\s*\Z"
)


def begun_thoughts(prompt: str) -> str:
    """Return the opening tag with which a prompt ends, and the space after it; an empty text if it ends otherwise.

    A response to such a prompt does not begin with the tag, because the chat template (or the user's beginning of an
    answer) has written it already.
    """
    found = _BEGUN.search(prompt)
    return "" if found is None else found[0]
