"""Units, money and percent at the ends of an answer."""

import re
from dataclasses import dataclass

_SYNONYMS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "inch": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mile": "mi mile",
    "mg": "mg milligram",
    "g": "g gm gram gramme",
    "kg": "kg kilogram kilogramme",
    "oz": "oz ounce",
    "lb": "lb pound",
    "ton": "ton tonne",
    "ml": "ml milliliter millilitre cc",
    "l": "l liter litre",
    "gallon": "gal gallon",
    "second": "s sec second",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "yr year",
    "mph": "mph miles-per-hour",
    "kmh": "km/h kmh kph kmph kilometers-per-hour",
    "degree": "degree deg °",
    "radian": "radian rad",
    "dollar": "dollar usd buck $",
    "cent": "cent ¢",
    "euro": "euro eur €",
    "sterling": "gbp £",
    "rupee": "rupee rs ₹",
    "yen": "yen jpy ¥",
}
_CANONICAL = {name: unit for unit, names in _SYNONYMS.items() for name in names.split()}
_SINGLE = frozenset("mglshLV")
"""Letters that are units if a space separates them from a number; else they may be variables."""
_MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNITS = re.compile(
    "and|or|to|of|times|plus|minus|over|is|are|was|be|not|if|then|by|at|for|remainder|modulo|mod|x|with|than|from|the|a|an"
    "|but|no|less|more|greater|equals?|divided|half|third|quarter|dozen|pm|am"
)
_NUMBER = (
    r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:\s*/\s*\d+(?:\.\d+)?)?(?:\s+\d+/\d+)?"
    r"(?:\s*\\(?:times|cdot)\s*10\s*\^\s*\{?-?\d+\}?)?"
)
_FRACTION = r"[-+]?\d*\s*\\frac\{\d+\}\{\d+\}"
_WORD = r"[A-Za-z]+(?:\s*\^\s*\{?\d\}?)?"
_UNIT = rf"{_WORD}(?:(?:\s+|-|/|\s*/\s*){_WORD}){{0,3}}"
_COUNTED = re.compile(rf"({_NUMBER}|{_FRACTION})(\s*)({_UNIT})\.?")
_ENCLOSED = re.compile(
    rf"({_NUMBER}|{_FRACTION})\s*\(\s*([A-Za-z]{{4,}}|[A-Za-z]+(?:\s+[A-Za-z]+)+|[ckm]?m|ft|kg)\s*\)"
)
"""A number with what is counted in brackets, as in ASDiv: `9 (apples)`."""
_TEXT_UNIT = re.compile(
    r"(.*[\d})a-zA-Z])\s*(?:\\[ ,;!~])*\s*\\(?:text|mathrm|textrm|mbox|textbf|rm)\s*\{([^{}]*)\}(\^\{?\d\}?)?"
)
_KNOWN_UNIT = re.compile(
    r"(.*[\d})a-z])\s+((?:"
    + "|".join(sorted((re.escape(name) for name in _CANONICAL if len(name) > 1), reverse=True))
    + r")s?)(\s*\^\s*\{?\d\}?)?"
)
_MONEY = re.compile(r"([-+]?)\s*(?:(?:US|C|A)?\\?\$|€|£|¥|₹|Rs\.?\s)\s*(?=[-+\d.])")
_PERCENT = re.compile(
    r"(.*\S)\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|\bper ?cent(?:age)?(?: points)?|\bpct\.?)", re.I | re.S
)
_DEGREES = re.compile(r"(.*\S)\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*([CFK]?)", re.S)


_ORDINAL = re.compile(r"(\d+)(?:\s*\^\s*)?\{?(?:\\text\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\}?")
_MODULUS = re.compile(r"(.*\S)\s*(?:\(\s*\\?mod\s*\{?(\w+)\}?\s*\)|\\pmod\s*\{?(\w+)\}?)", re.S)


@dataclass(frozen=True)
class Measured:
    """A text without its unit."""

    text: str
    unit: str | None = None
    """Its unit by one name, such as `cm` or `mile^2`; of things that are counted, such as apples, an empty text."""
    percent: bool = False
    multiple: int = 0
    """Power of ten that a word such as million multiplies by."""


def split_unit(text: str) -> Measured:
    """Split the unit, the currency, or the percent sign off an answer."""
    if found := _ORDINAL.fullmatch(text):
        return Measured(found[1], "")
    if found := _MODULUS.fullmatch(text):
        return Measured(re.sub(r"^[a-z]\s*\\equiv\s*", "", found[1]), f"mod {found[2] or found[3]}")
    if found := _PERCENT.fullmatch(text):
        return Measured(found[1].removesuffix("\\"), percent=True)
    if found := _MONEY.match(text):
        rest = split_unit(found[1] + text[found.end() :])
        return Measured(rest.text, _canonical(found[0].strip("+- \\")), rest.percent, rest.multiple)
    if found := _DEGREES.fullmatch(text):
        return Measured(found[1], f"degree{found[2]}")
    if (found := _TEXT_UNIT.fullmatch(text)) and not _reserved(found[2]):
        return _with_words(found[1], found[2] + (found[3] or ""))
    if found := _COUNTED.fullmatch(text):
        number, space, words = found.groups()
        glued = not space and _canonical(words) == ""
        if not glued and not _reserved(words) and not (len(words) == 1 and (not space or words not in _SINGLE)):
            return _with_words(number, words)
    if (found := _ENCLOSED.fullmatch(text)) and not _reserved(words := found[2].partition(" of ")[0]):
        return _with_words(found[1], words)
    if found := _KNOWN_UNIT.fullmatch(text):
        return Measured(found[1], _canonical(found[2] + (found[3] or "")))
    return Measured(text)


def glued_unit(text: str) -> Measured | None:
    """Return another reading of a number with one letter after it, such as `5m`, which may be metres or a variable."""
    found = re.fullmatch(rf"({_NUMBER})([a-zA-Z])", text)
    return Measured(found[1], _canonical(found[2])) if found and found[2] in _SINGLE else None


def _reserved(words: str) -> bool:
    return any(_NO_UNITS.fullmatch(word.lower()) for word in re.findall(r"[A-Za-z]+", words))


def _with_words(number: str, words: str) -> Measured:
    first, _, rest = words.strip().partition(" ")
    if (power := _MULTIPLES.get(first.lower().removesuffix("s"))) is not None:
        return Measured(number, _canonical(rest) if rest else None, multiple=power)
    if first.lower() in ("percent", "percentage"):
        return Measured(number, percent=True)
    return Measured(number, _canonical(words))


def _canonical(words: str) -> str:
    """Return a unit's one name; an empty text for what is counted."""
    if "$" in words:
        return "dollar"
    text = re.sub(r"\s*\^\s*\{?(\d)\}?", r"^\1", words.strip().strip(".")).lower()
    text, _, power = text.partition("^")
    for name, exponent in (("square", "2"), ("sq", "2"), ("cubic", "3"), ("cu", "3")):
        for pattern in (rf"{name}\.?\s+", rf"\s+{name}d?"):
            if re.match(pattern, text) or re.search(rf"{pattern}$", text):
                text, power = re.sub(rf"^{name}\.?\s+|\s+{name}d?$", "", text), exponent
    text = re.sub(r"\s+", "-", text.strip())
    text = re.sub(r"^(.*?)s?-?(?:/|-per-|-an-)-?(.*)$", r"\1/\2", text) if text not in _CANONICAL else text
    if "/" in text and text not in _CANONICAL:
        over = [_CANONICAL.get(part, _CANONICAL.get(part.removesuffix("s"))) for part in text.split("/")]
        joined = "/".join(part or "?" for part in over)
        return {"mile/hour": "mph", "km/hour": "kmh"}.get(joined, "" if "?" in joined else joined)
    unit = _CANONICAL.get(text) or _CANONICAL.get(text.removesuffix("s"))
    if unit is None:
        return ""
    return f"{unit}^{power}" if power else unit
