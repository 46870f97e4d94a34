"""The block of a response that the code reward judges.

It is the last closed Markdown block that is marked as Python, after the thoughts. If none is marked so, it is the last
one without a mark that is a program: sample output is not. Blocks of other languages don't count.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlhfless_functions.rewards.thoughts import answer_span

_PYTHON = {"python", "python3", "py", "py3", "python2", "ipython", "ipython3"}
_FENCE = re.compile(r"^(?P<before>.*?)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
_LANGUAGE = re.compile(r"[{.\s]*(?P<name>[\w+#-]*)")
_INNER = 4
"""Spaces by which a fence inside a block, such as a docstring's, is indented more than the block's own."""


@dataclass
class _Block:
    fence: str
    indent: int
    language: str
    lines: list[str]

    @property
    def text(self) -> str:
        """The content, without the indentation of the fence."""
        cut = (line[min(self.indent, len(line) - len(line.lstrip())) :] for line in self.lines)
        return "".join(f"{line}\n" for line in cut)


def judged_block(response: str, prompt: str = "") -> str | None:
    """Return the code of a response that is judged; None if it has none.

    Args:
        response: the response.
        prompt: the prompt as the model saw it, which may begin the thoughts.
    """
    text = response.replace("\r\n", "\n")
    span = answer_span(text, prompt)
    if span is None:
        return None
    answer = text[slice(*span)]
    blocks = list(_blocks(answer))
    marked = [block.text for block in blocks if block.language in _PYTHON and not _is_session(block)]
    if marked:
        return marked[-1]
    plain = [block.text for block in blocks if not block.language and not _is_session(block)]
    return next((text for text in reversed(plain) if _is_program(text)), plain[-1] if plain else None)


def _blocks(text: str) -> Iterator[_Block]:
    """Yield the closed blocks. A block that is left open ends where the next one with a language begins."""
    block: _Block | None = None
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if block is None:
            block = _opened(found)
            continue
        if found is None:
            block.lines.append(line)
            continue
        before, fence, info = found["before"], found["fence"], found["info"].strip()
        own = fence[0] == block.fence[0] and len(fence) >= len(block.fence)
        indented = not before.strip() and len(before) >= block.indent + _INNER
        if own and not info and not indented:
            if before.strip():
                block.lines.append(before)
            yield block
            block = None
        elif not before.strip() and info[:1].isalpha() and not indented:
            block = _opened(found)
        else:
            block.lines.append(line)


def _opened(found: re.Match[str] | None) -> _Block | None:
    """Return the block that a line opens. The fence may follow prose, if nothing but a language follows it."""
    if found is None:
        return None
    before, info = found["before"], found["info"].strip()
    if before.strip() and (found["fence"][0] == "~" or " " in info):
        return None
    return _Block(found["fence"], 0 if before.strip() else len(before), _language(info), [])


def _language(info: str) -> str:
    found = _LANGUAGE.match(info)
    return found["name"].lower() if found else ""


def _is_session(block: _Block) -> bool:
    """Return whether a block shows an interactive session."""
    return block.text.lstrip().startswith(">>>")


def _is_program(text: str) -> bool:
    """Return whether a text is Python that does something: numbers and words, as sample output has them, do not."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(node, ast.Expr) or any(isinstance(each, ast.Call) for each in ast.walk(node)) for node in body
    )
