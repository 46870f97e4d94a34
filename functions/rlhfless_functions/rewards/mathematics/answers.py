"""The answer in a response or a whole solution: its last box, tag or final line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlhfless_functions.rewards.mathematics.reading import read
from rlhfless_functions.rewards.mathematics.shapes import Reading, Words

_BOX = re.compile(r"\\+(?:boxed|fbox)\s*(?P<brace>\{)?|(?<![a-zA-Z])boxed\s*(?P<bare>\{)")
_TAG = re.compile(r"<(?:final[_ ]?)?answer>", re.I)
_CLOSED_TAG = re.compile(r"</(?:final[_ ]?)?answer>", re.I)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_SAID = re.compile(r"\b(?:answers?|options?|choices?)\b(?:[^\n.:=]{0,60}?\b(?:is|are)\b|[ \t*]*[:=])[ \t:*]*\n*", re.I)
_OPTION = re.compile(r"^(?:option|choice)\s+", re.I)
_BETWEEN = re.compile(
    r"(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|[a-zA-Z](?:_\{?\w\}?)?\s*=|\\q?quad|\\[()\[\],;]|[$,;&\s])*"
)
_MATHEMATICS = re.compile(r"\$\$([^$]+)\$\$|(?<![\\\d$])\$(?! )([^$\n]+)(?<![\\ ])\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_JOINING = frozenset({"and", "or", ","})
_SYMBOL = re.compile(
    r"(?![aAI][.,]?$)[a-zA-Z](?:\([a-z]\))?[.,;!?)]*|.*\d.*|[-+*/=^×÷·<>≤≥()\[\],.;]+|.*[√π∞°].*", re.S
)
_EXPLAINED = re.compile(r"[.,;]?\s+(?:because|since|as|so|which|where|when|for|after|by|in)\b|[.;!?](?:\s|$)|\n")


@dataclass(frozen=True)
class _Found:
    start: int
    text: str


def answer_of(text: str, truncated: bool = False) -> Reading | None:
    """Return what a response answers, without its thoughts.

    The last box or `<answer>` tag that holds something; else what follows the last `####`; else what follows the last
    "the answer is" or "answer:"; else the last mathematics of the prose. It is read whole.

    Args:
        text: the response after its thoughts.
        truncated: whether it was cut off. Then a box or tag that is not closed is no answer: `\\boxed{12` may go on.

    Returns:
        None if nothing is answered, or if the answer is not mathematics as a whole.
    """
    marked = [*_tags(text, truncated), *_boxes(text, truncated)]
    if marked:
        last = max(marked, key=lambda found: found.start)
        return _of_part(last.text)
    hashes = _HASHES.findall(text)
    if hashes:
        return read(hashes[-1])
    if _SAID.search(text):
        return _said(text)
    return read(text) or _last_of(text)


def truth_of(text: str) -> Reading | None:
    """Return what a ground truth says: the text as a whole, or the answer that a whole solution marks.

    Returns:
        None if it is not mathematics as a whole, such as a sentence with several numbers.
    """
    marked = [*_tags(text, False), *_boxes(text, False)]
    if marked or _HASHES.search(text):
        return answer_of(text)
    return _of_part(text)


def _of_part(text: str) -> Reading | None:
    """Read what a box or tag holds, or a ground truth, which may be a sentence with one formula."""
    if (whole := read(text)) is not None:
        return whole
    if _SAID.search(text):
        return _said(text)
    held = {next(part for part in found if part).strip() for found in _MATHEMATICS.findall(text)}
    outside = _MATHEMATICS.sub("", text)
    return read(held.pop()) if len(held) == 1 and not re.search(r"\d", outside) else None


def _said(text: str) -> Reading | None:
    """Read what follows the last `the answer is` that is followed by more than a word, such as `right`."""
    answers = [_first_of(text[found.end() :]) for found in _SAID.finditer(text)]
    while len(answers) > 1 and isinstance(answers[-1], Words) and not isinstance(answers[-2], Words | None):
        answers.pop()
    return answers[-1]


def _tags(text: str, truncated: bool) -> Iterator[_Found]:
    for opened in _TAG.finditer(text):
        closed = _CLOSED_TAG.search(text, opened.end())
        if closed is None and truncated:
            yield _Found(opened.start(), "")
            continue
        held = text[opened.end() : closed.start() if closed else len(text)]
        if held.strip() and not _BOX.search(held):
            yield _Found(opened.start(), held)


def _boxes(text: str, truncated: bool) -> Iterator[_Found]:
    """Yield the contents of boxes; boxes with no more than `or` or `x =` between them are one."""
    before: tuple[int, int, str] | None = None
    for box in _BOX.finditer(text):
        if before is not None and box.start() < before[1]:
            continue  # a box within a box
        end, held = _box(text, box, truncated)
        if held is None:
            yield _Found(box.start(), "")
            continue
        if not held.strip():
            continue
        start = box.start()
        if before is not None and _one_answer(text[before[1] : start]):
            start = before[0]
            held = held if held == before[2] else f"{before[2]}, {held}"
        before = (start, end, held)
        yield _Found(box.start(), held)


def _one_answer(between: str) -> bool:
    said = re.search(r"[a-zA-Z,;&]", between) is not None
    return _BETWEEN.fullmatch(between) is not None and (said or "\n" not in between)


def _box(text: str, box: re.Match[str], truncated: bool) -> tuple[int, str | None]:
    """Return where a box ends and what it holds; None if it was cut off."""
    start = box.end()
    if not (box["brace"] or box["bare"]):
        taken = re.compile(r"\s*(\\[a-zA-Z]+|-?\d+(?:\.\d+)?|\w)").match(text, start)
        return (taken.end(), taken[1]) if taken else (start, "")
    end = _closing_brace(text, start - 1)
    if end is not None:
        percent = re.compile(r"\s*\\?%").match(text, end + 1)
        return (percent.end(), text[start:end] + "\\%") if percent else (end + 1, text[start:end])
    if truncated:
        return len(text), None
    held = re.split(r"\n|\$|\\\)|\\\]", text[start:], maxsplit=1)[0]
    return start + len(held), held


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for place in range(start, len(text)):
        if text[place] in "{}" and (text[place - 1] != "\\" or text[place - 2 : place] == "\\\\"):
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return place
    return None


def _first_of(text: str) -> Reading | None:
    """Read what follows `the answer is`: as much of the line or sentence as is mathematics."""
    line = _OPTION.sub("", text.strip().split("\n", 1)[0])
    formula = _MATHEMATICS.match(text.strip().lstrip("*").strip())
    if (whole := read(line)) is not None:
        return whole
    for found in _EXPLAINED.finditer(line):
        if (part := read(line[: found.start()])) is not None:
            return part
    if formula:
        return read(formula[0])
    return _last_of(line) if len(_runs(line)) == 1 else None


def _last_of(text: str) -> Reading | None:
    """Read the last mathematics of prose: a formula, or the last words that are symbols and numbers."""
    formulas = list(_MATHEMATICS.finditer(text))
    after = text[formulas[-1].end() :] if formulas else text
    runs = _runs(after)
    if runs:
        return read(runs[-1].strip("?:"))
    if not formulas:
        return None
    last = formulas.pop()
    held = last[0].strip("$")
    while formulas and _one_answer(text[formulas[-1].end() : last.start()]) and formulas[-1].end() < last.start():
        last = formulas.pop()
        held = f"{last[0].strip('$')}, {held}"
    return read(held)


def _runs(text: str) -> list[str]:
    """Return the runs of words that are symbols and numbers, with a number in each; `3 or 7` is one run."""
    runs: list[list[str]] = [[]]
    for line in text.splitlines():
        for word in re.sub(r"[*_`]{2,}|`", " ", line).split():
            if _SYMBOL.fullmatch(word) or (word.lower() in _JOINING and runs[-1]):
                runs[-1].append(word)
                if re.fullmatch(r".*[.;:!?]", word) and not re.search(r"[(\[]", " ".join(runs[-1])):
                    runs.append([])
            else:
                runs.append([])
        runs.append([])
    joined = []
    for run in runs:
        while run and (run[-1].lower() in _JOINING):
            run.pop()
        if any(character.isdigit() for character in "".join(run)):
            joined.append(" ".join(run))
    return joined
