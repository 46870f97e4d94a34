"""Mathematics in plain text, rewritten as the LaTeX that math-verify's parser reads."""

import re

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ",
    "∗": "*", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "′": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "⁄": "/", "∕": "/",
    "，": ",", "（": "(", "）": ")", "％": "%", "＝": "=", "：": ":", "；": ";",
}  # fmt: skip
_FRACTIONS = {
    "½": "1/2",
    "⅓": "1/3",
    "⅔": "2/3",
    "¼": "1/4",
    "¾": "3/4",
    "⅕": "1/5",
    "⅛": "1/8",
    "⅜": "3/8",
    "⅝": "5/8",
    "⅞": "7/8",
    "⅙": "1/6",
    "⅚": "5/6",
}
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|ln|log|gcd|lcm|exp|(?:max|min)(?=\\s*[({])"
_NAMES = "alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|psi|rho|tau|pi"
_OPEN, _CLOSE = "([{", ")]}"


def to_latex(text: str) -> str:
    """Rewrite plain notation: `2*sqrt(3)`, `x**2`, `1e-5`, `1 1/2`, `½`, `x²`, `2π`, `(-inf, 2]`, `1,000`. LaTeX stays
    as it is."""
    text = re.sub(
        r"(\\[a-zA-Z]+)?\\(?:mathrm|operatorname)\s*\{\s*([ie])\s*\}",
        lambda found: f"{found[1]} {found[2]}" if found[1] else found[2],
        text,
    )
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    text = re.sub(r"(?<=\d)(?=[½⅓⅔¼¾⅕⅛⅜⅝⅞⅙⅚])", " ", text)
    for sign, fraction in _FRACTIONS.items():
        text = text.replace(sign, fraction)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_LOWERED)}}}", text)
    text = re.sub(
        r"([<>!])=|=([<>])", lambda found: {"<": r"\le ", ">": r"\ge ", "!": r"\ne "}[found[1] or found[2]], text
    )
    text = text.replace("**", "^").replace("+/-", r"\pm ").replace("+-", r"\pm ")
    text = re.sub(r"\\[lr]angle(?![a-z])\s*", lambda found: "(" if found[0][1] == "l" else ")", text)
    text = re.sub(r"^<([^<>]*,[^<>]*)>$", r"(\1)", text)
    text = _roots(text)
    text = _numbers(text)
    text = re.sub(r"(?<![a-zA-Z])\\?log(2|10)\s*(?=\()", r"\\log_{\1}", text)
    text = re.sub(r"(?<=[a-zA-Z])\s+in\s+(?=[\[({])", r" \\in ", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1", text)
    text = re.sub(rf"(?<![\\a-zA-Z])({_NAMES})(?![a-zA-Z])", r"\\\1 ", text)
    text = re.sub(
        r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\(?\s*)(\d+)\s*(?:°|\^\s*\{?\s*\\circ\s*\}?)",
        r"\1{(\\frac{\2\\pi}{180})}",
        text,
    )
    text = re.sub(r"(?<![\\a-zA-Z])(?:infinity|Infinity|inf|oo)(?![a-zA-Z])", r"\\infty ", text)
    return _powers(text)


def _numbers(text: str) -> str:
    text = re.sub(r"(\d+)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", _repeating, text)
    text = re.sub(r"(?<=\d)\s*[xX]\s*10\s*\^", r" \\times 10^", text)
    text = re.sub(r"(?<=\d)\{,\}(?=\d{3})|(?<=\d)\\[,!;](?:,\\!)?\s*(?=\d{3})|(?<=\d),\\!\s*(?=\d{3})", ",", text)
    text = re.sub(r"(?<![\w.,])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d+)(?![\w.])", r"(\1 \\cdot 10^{\2})", text)
    text = re.sub(r"(?<![\d.,/^])(\d{1,3}(?: \d{3})+)(?![\d/])", lambda found: found[1].replace(" ", ""), text)
    text = re.sub(r"(?<![\w.,/^}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"(?<![\w.,/^}])(\d+)\s*\\[dtc]?frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    return re.sub(r"(?<![\w.,/^}])(\d+)\s*\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)", r"(\1+\\frac{\2}{\3})", text)


def _repeating(found: re.Match[str]) -> str:
    """Return `0.1\\overline{6}` as the fraction 15/90."""
    whole, once, again = found.groups()
    nines = int("9" * len(again) + "0" * len(once))
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{nines}}}"


def _roots(text: str) -> str:
    """Rewrite `sqrt(…)`, `√3`, `cbrt(…)`, `abs(…)` and LaTeX's `\\sqrt(…)`."""
    found = re.search(
        r"(?<![a-zA-Z])\\?(sqrt|cbrt|abs)\s*(?=\()|(?<![\\a-zA-Z])sqrt\s*(?=[{\d])|[√∛]\s*(?=[(\da-zA-Z\\])", text
    )
    if not found:
        return text
    before, name, rest = text[: found.start()], found[0].strip(), text[found.end() :]
    end = closing(rest, 0) if rest[0] in "({" else None
    if end is not None:
        inside, after = rest[1:end], rest[end + 1 :]
    elif rest[0] in "({":
        return text
    else:
        taken = re.match(r"\\[a-zA-Z]+\s*|\d+(?:\.\d+)?|[a-zA-Z]", rest)
        inside, after = (taken[0], rest[taken.end() :]) if taken else (rest[0], rest[1:])
    inside = _roots(inside)
    root = (
        f"|{inside}|"
        if "abs" in name
        else rf"\sqrt[3]{{{inside}}}"
        if name in ("∛", "cbrt", "\\cbrt")
        else rf"\sqrt{{{inside}}}"
    )
    return before + root + _roots(after)


def _powers(text: str) -> str:
    """Rewrite `^(…)` as `^{…}`, and `^-2` as `^{-2}`."""
    start = 0
    while (found := re.compile(r"\^\s*\(").search(text, start)) is not None:
        end = closing(text, found.end() - 1)
        if end is None:
            break
        inside = text[found.end() : end]
        text = f"{text[: found.start()]}^{{{inside}}}{text[end + 1 :]}"
        start = found.start() + 2
    return re.sub(r"\^\s*([-+]?\d+(?:\.\d+)?|-[a-zA-Z])", r"^{\1}", text)


def closing(text: str, start: int) -> int | None:
    """Return where the bracket at `start` closes, by a bracket of any kind (`[0, 1)`); None if it does not."""
    depth = 0
    for place in range(start, len(text)):
        if text[place] in _OPEN:
            depth += 1
        elif text[place] in _CLOSE:
            depth -= 1
            if depth == 0:
                return place
    return None
