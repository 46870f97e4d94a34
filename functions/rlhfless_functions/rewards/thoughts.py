"""The part of a response that answers: what follows its thoughts."""

import re

from rlhfless_functions.data.thoughts import begun_thoughts

_NAMES = "think|thinking|thought|thoughts|reasoning|reason|seed:think"
_OPEN = re.compile(rf"<(?:{_NAMES})\s*>|\[THINK\]|◁think▷|<\|begin_of_thought\|>", re.I)
_CLOSE = re.compile(rf"</(?:{_NAMES})\s*>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>", re.I)


def answer_span(response: str, prompt: str = "") -> tuple[int, int] | None:
    """Return where the answer begins and ends in a response.

    The answer follows the last end of thoughts, such as `</think>`, and ends before thoughts that begin again. A
    response without any thoughts is all answer.

    Args:
        response: the response, without the beginning that stands in the prompt.
        prompt: the prompt as the model saw it, which may begin the thoughts.

    Returns:
        None if the thoughts never ended, so that nothing was answered.
    """
    closes = list(_CLOSE.finditer(response))
    if not closes and begun_thoughts(prompt):
        return None
    start = closes[-1].end() if closes else 0
    opened = _OPEN.search(response, start)
    end = opened.start() if opened else len(response)
    if opened and not response[start:end].strip():
        return None
    return start, end
