"""A text as mathematics, read whole or not at all."""

import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify.grader import should_treat_as_complex
from sympy import Float, Integer, Tuple

from rlhfless_functions.rewards.mathematics.plain import closing, to_latex
from rlhfless_functions.rewards.mathematics.shapes import Expression, Items, Reading, Words
from rlhfless_functions.rewards.mathematics.units import Measured, glued_unit, split_unit

_LONGEST = 2000
"""Characters of a text that may be one answer."""
_NORMAL = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_WRAPPED = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>.+)\\\)|\\\[(?P<d>.+)\\\]|\*\*(?P<e>[^*]+)\*\*|`(?P<f>[^`]+)`"
    r"|\"(?P<h>[^\"]+)\"|<b>(?P<i>.+)</b>|\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|boldsymbol|bm)\s*\{(?P<j>[^{}]+)\}"
    r"|\\(?:boxed|fbox)\s*\{(?P<k>.+)\}|__(?P<l>[^_]+)__",
    re.S,
)
_NOISE = re.compile(
    r"\\(?:displaystyle|textstyle|left|right|bigl|bigr|Bigl|Bigr|big|Big|limits)(?![a-zA-Z])|\\(?:hspace|vspace)\{[^}]*\}"
)
_SPACES = re.compile(r"(?<!\\)\\(?:[;: ]|q?quad(?![a-zA-Z]))|~|(?<![\d\\])\\,|(?<!\\)\\,(?!\d{3})|\s+")
"""LaTeX's spaces. After a backslash, such as of a matrix's `\\\\ `, there is none."""
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::\d{2})?\s*(?:([ap])\.?\s*m\.?)?", re.I)
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[\s'’,.\-()])*")
_CHOICE = re.compile(r"\(?([A-Ja-j])\)?[.:]?")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,]*,?\d)")
_MEANING = re.compile(r"(?:pi|inf|infinity|infty|oo|alpha|beta|gamma|theta|lambda)", re.I)
_CHOICES = re.compile("[A-H]{2,8}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}")
_REALS = re.compile(r"(?:the set of )?all (?:real numbers|reals)", re.I)
_FORMULAS = re.compile(r"[^$]*(?:(?<!\\)\$(?! )[^$]+(?<![\\ ])\$[^$]*)+")
_FUNCTION = re.compile(r"\b(?:sin|cos|tan|sec|csc|cot|ln|log|exp|sqrt|arcsin|arccos|arctan)\b")
_SHORT_WORDS = re.compile("no|on|or|up|if|in|is|it|to|at|by|be|do|go|so|we|us|my|me|he|an|as|am|pm|of|ok")
_SEPARATOR = re.compile(
    r"\s*(?:[,;]\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?:and|or)(?![a-zA-Z]))?|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|\\(?:land|lor|vee|wedge)(?![a-zA-Z]))\s*"
)
_UNION = re.compile(r"\\cup(?![a-zA-Z])|(?<=[\])])\s*U\s*(?=[\[(])")


@lru_cache(maxsize=4096)
def read(text: str) -> Reading | None:
    """Read a text as one answer.

    Returns:
        None if it is not mathematics as a whole, nor words alone.
    """
    text = _stripped(text)
    if not text or len(text) > _LONGEST:
        return None
    if _REALS.fullmatch(text):
        text = "\\mathbb{R}"
    if _CHOICES.fullmatch(text) and list(text) == sorted(set(text)):
        return Items("", tuple(Words(letter.lower()) for letter in text), text)
    return _choice(text) or _words(text) or _read(_thousands(to_latex(text)), text)


def _choice(text: str) -> Words | None:
    """Read a choice's letter with its answer: `(B) 42`, `\\textbf{(B)}\\ 42`, `B. 42`."""
    found = re.match(
        r"(?:\\text(?:bf)?\s*\{)?\s*(?:\(([A-J])\)|([A-J])[.):](?!\d))\s*(\})?\s*(?=\S)(?!and\b|or\b|,)", text
    )
    if not found:
        return None
    rest = text[found.end() :]
    held = read(rest if found[3] or "{" not in found[0] else rest.removesuffix("}"))
    return Words((found[1] or found[2]).lower(), held) if held is not None else None


def _stripped(text: str) -> str:
    """Remove markup, LaTeX's spaces and sizes, and what ends a sentence."""
    while True:
        before = text
        text = _NOISE.sub("", text).strip().strip("\u200b\ufeff").strip()
        text = re.sub(r"(?<!\\)\\[ ,;!]*$|^(?:\\[,;! ])+", "", text).strip()
        text = text.rstrip(".,;") if not text.endswith(("\\,", "\\;")) else text[:-2]
        found = _WRAPPED.fullmatch(text)
        if found:
            inside = next(part for part in found.groups() if part is not None)
            text = inside if _balanced(inside) else text
        if _FORMULAS.fullmatch(text):
            text = re.sub(r"(?<!\\)\$", "", text)
        text = re.sub(r"\{\\(?:bf|rm|it|sf)\s+([^{}]*)\}", r"\1", text).removesuffix("\\\\")
        text = _SPACES.sub(" ", re.sub(r"(?<!\\)\\!\s*", "", text)).strip()
        if text == before:
            return text


def _balanced(text: str) -> bool:
    depth = 0
    for character in text.replace("\\{", "").replace("\\}", ""):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def _words(text: str) -> Words | None:
    if _DATE.fullmatch(text):
        return Words(text)
    if found := _TIME.fullmatch(text.replace("{:}", ":").replace("\\text{", "").replace("}", "")):
        half = f" {found[3].lower()}m" if found[3] else ""
        return Words(f"{found[1].lstrip('0') or '0'}:{found[2]}{half}")
    plain = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", text).strip()
    if (found := _CHOICE.fullmatch(plain)) and (plain[0] == "(" or plain != text or found[1].isupper()):
        return Words(found[1].lower())
    if not _WORDS.fullmatch(plain) or _MEANING.fullmatch(plain):
        return None
    if _FUNCTION.search(plain):
        return None
    letters = plain.replace(" ", "")
    if len(letters) == 1 or (
        len(letters) == 2 and letters == plain == text and not _SHORT_WORDS.fullmatch(letters.lower())
    ):
        return None
    if re.search(r"[a-zA-Z]\(|,", plain) or re.fullmatch(r"(?:[a-zA-Z] ?(?:and|or|,|-) ?)+[a-zA-Z]", plain):
        return None
    return Words(re.sub(r"[\s\-]+", " ", re.sub(r"['’.,()]", "", plain)).strip().lower())


def _thousands(latex: str) -> str:
    """Join the digits of `1,000`, but not of the pair `(1,234)` or of a list such as `1,200,3`."""
    has_others = ", " in latex or not re.match(r"[(\[{]|\\[{lL]", latex)
    return _THOUSANDS.sub(lambda found: found[1].replace(",", ""), latex) if has_others else latex


def _read(latex: str, text: str) -> Reading | None:
    """Read LaTeX: a list, a bracketed form, a ratio, a union, or one expression."""
    latex = latex.strip()
    parts = _split(latex, _SEPARATOR)
    if len(parts) > 1:
        return _items("", parts, latex)
    for pattern in (
        r"^[a-zA-Z](?:_\{?\w+\}?)?\s*\\in(?![a-zA-Z])\s*",
        r"^(?:\([a-zA-Z, ]+\)|\\(?:vec|mathbf|overrightarrow)\{\w+\}|[a-zA-Z](?:\([a-z, ]+\))?)\s*=\s*(?=[\[({\\])",
    ):
        rest = re.sub(pattern, "", latex)
        if rest != latex and isinstance(inner := _read(rest, rest), Items):
            return inner
    if (inside := _bracketed(latex)) is not None:
        return inside
    unions = _split(latex, _UNION)
    if len(unions) > 1:
        return _items("∪", unions, _UNION.sub(r"\\cup ", latex))
    ratio = latex.replace("{:}", ":").split(":")
    if len(ratio) > 1:
        parts = _items(":", [part.strip() for part in ratio], latex)
        return parts if parts and all(isinstance(part, Expression) for part in parts.items) else None
    return _expression(latex, text)


def _items(brackets: str, parts: list[str], latex: str) -> Items | None:
    read_parts = [_words(part) or _read(part, part) if part.strip() else None for part in parts]
    items = tuple(part for part in read_parts if part is not None)
    if len(items) != len(parts) or (not brackets and not _are_alike(items)):
        return None
    return Items(brackets, items, latex)


def _are_alike(items: tuple[Reading, ...]) -> bool:
    """Return whether a list holds several answers: not `12 and a half`, nor `5 hours and 30 minutes`."""
    words = [len(item.text) > 1 for item in items if isinstance(item, Words)]
    units = [item.unit for item in items if isinstance(item, Expression) and item.unit]
    return not (any(words) and len(words) < len(items)) and not (len(items) == len(units) == len(set(units)))


def _bracketed(latex: str) -> Reading | None:
    """Read what one pair of brackets holds, if it is several; or if it is a set."""
    opened = re.match(r"\\\{|\\lbrace(?![a-z])|[(\[{]", latex)
    if not opened:
        return None
    marks = latex.replace("\\lbrace", "{").replace("\\rbrace", "}")
    marks = marks.replace("\\{", "{").replace("\\}", "}")
    end = closing(marks, 0)
    if end is None or end != len(marks) - 1:
        return None
    inside = marks[1:-1].strip()
    kind = marks[0] + marks[-1]
    if kind == "{}":
        return _set_or_group(inside, latex, kind)
    if "{" in kind or "}" in kind:
        return None
    parts = _split(inside, _SEPARATOR)
    if len(parts) > 1:
        return _items(kind, parts, latex)
    if kind == "[]":
        return _read(inside, inside) if inside and "\\" not in inside else None
    return None


def _set_or_group(inside: str, latex: str, kind: str) -> Reading | None:
    parts = _split(inside, _SEPARATOR) if inside else []
    if described := re.match(r"[a-zA-Z]\s*(?:\\mid(?![a-z])|\||:)\s*", inside):
        return _read(inside[described.end() :], inside)
    if len(parts) > 1 or latex.startswith("\\"):
        return _items(kind, parts, latex) if not re.search(r"\\mid|\||:", inside) else None
    return _read(inside, inside) if inside else None


def _split(latex: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators that no bracket encloses."""
    depth, parts, start, place = 0, [], 0, 0
    while place < len(latex):
        if depth == 0 and (found := separator.match(latex, place)) and found[0].strip():
            parts.append(latex[start:place])
            start = place = found.end()
            continue
        if latex.startswith("\\begin", place) or latex.startswith("\\end", place):
            depth += 1 if latex.startswith("\\begin", place) else -1
        depth += (latex[place] in "([{") - (latex[place] in ")]}")
        place += 1
    return [part.strip() for part in [*parts, latex[start:]]]


def _expression(latex: str, text: str) -> Reading | None:
    measured = split_unit(latex)
    if re.search(r"\d-\d", measured.text) and (measured.unit is not None or measured.percent):
        return None  # a range
    value = _value(measured)
    if value is None:
        return None
    value, base = value
    if isinstance(value, FiniteSet | Tuple) and measured.unit is None and not measured.percent:
        return Items("", tuple(Expression(each, str(each)) for each in value.args), latex)
    glued = glued_unit(latex)
    alone = Expression(_value(glued)[0], glued.text, glued.unit) if glued and _value(glued) else None  # type: ignore[index]
    return Expression(value, measured.text, measured.unit, measured.percent, base, alone)


def _value(measured: Measured) -> tuple[Any, str] | None:
    """Return SymPy's object, and the base of a number that names it."""
    latex, base = measured.text.strip(), ""
    if found := re.fullmatch(r"(\d+)_\s*\{?(\d+)\}?", latex):
        latex, base = found[1], found[2]
    if re.fullmatch(r"[-+]?\d+", latex):
        value: Any = Integer(int(latex)) if len(latex) < _LONGEST else None
    elif re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)", latex):
        value = Float(latex)
    elif not _is_notation(latex):
        return None
    else:
        value = _parsed(latex)
    if value is None:
        return None
    return (value * Integer(10) ** measured.multiple if measured.multiple else value), base


def _is_notation(latex: str) -> bool:
    """Return whether a text can be mathematics: no words, no numbers side by side, nothing that the parser drops."""
    bare = re.sub(
        r"\\(?:text|mathrm|operatorname|mathbf|mathbb|begin|end|mbox|textbf)\*?\s*\{[^{}]*\}|\\[a-zA-Z]+|\\.",
        " # ",
        latex,
    )
    if re.search(r"\d\s*[a-zA-Z]\s*\d|[a-zA-Z]\s+\d", bare):
        return False
    if re.search(r"(?<![_\d])\d+\s+[\d.]|[?@\"`$]|\d\.\d+\.|!\s*[\w(]", bare):
        return False
    return all(_is_product(run) for run in re.findall(r"[a-zA-Z]{2,}", bare))


def _is_product(letters: str) -> bool:
    """Return whether letters are a product of variables, such as `xyz` and `abc`, not a word."""
    if len(letters) == 2:
        return not _SHORT_WORDS.fullmatch(letters)
    return len(letters) <= 4 and list(letters) == sorted(set(letters)) and not set(letters[1:]) & set("aeiou")


def _parsed(latex: str) -> Any:
    """Return the parser's result of LaTeX; None if it can't read it."""
    try:
        normal = normalize_latex(latex, config=_NORMAL)
        return latex2sympy(
            normal, is_real=not should_treat_as_complex(normal), convert_degrees=False, normalization_config=None
        )
    except Exception:
        return None
