"""Format numbers for people: in the terminal, the report and the model card."""

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


_COMMANDS = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)},
    **{code: f"\\u{code:04x}" for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    **{code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)},
}
"""Characters that are no text, as they are shown."""


def printable(text: str) -> str:
    """Return text that commands no terminal: its control characters, except for tabs and ends of lines, and those that
    change the direction of writing become `\\x1b` and the like."""
    return text.translate(_COMMANDS)


def clipped(text: str, most: int) -> str:
    """Return text of at most `most` characters; what is left out becomes `…`."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def excerpt(text: str, most: int) -> str:
    """Return the beginning of a text of any length, `printable` and `clipped`. No more of it than that is looked at."""
    return clipped(printable(clipped(text, most)), most)


def format_money(amount: Decimal, currency: str) -> str:
    """At least two decimals, and as many more (up to six) as two significant digits need: `0.0042 USD`."""
    places = 2 if amount == 0 else min(max(2, 1 - amount.adjusted()), 6)
    return f"{amount:,.{places}f} {currency}"


def format_clock(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds: `1:07`, `2:03:00`."""
    whole = round(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, seconds_left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def format_number(value: float) -> str:
    """Three significant digits without an exponent where that is readable: `0.0315`, `1.5`, `24,000`, `3.1e-06`,
    `1e+16`."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if 1000 <= size < 1e12:
        return f"{value:,.0f}"
    if 0 < size < 1e-4:
        return f"{value:.1e}"
    return f"{value:.3g}"


def format_percent(share: float) -> str:
    """A share as a percentage with one decimal: `12.5 %`."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def averaged(values: Sequence[float], count: int) -> list[float]:
    """Reduce values to at most `count`: means of the finite values in neighbouring stretches of equal length.

    A stretch without any finite value is NaN.
    """
    if len(values) <= count:
        return list(values)
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    stretches = (values[start:end] for start, end in pairwise(edges))
    return [_mean([value for value in stretch if math.isfinite(value)]) for stretch in stretches]


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of at most `width` block characters between the least and the greatest value.

    Values that are not finite become spaces.
    """
    shown = averaged(values, max(1, width))
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return " " * len(shown)
    low, high = min(finite), max(finite)
    if not math.isfinite(high - low):
        return sparkline([value / 2 for value in shown], width)
    step = (high - low) / len(_BLOCKS)
    return "".join(_block(value, low, step) for value in shown)


def _block(value: float, low: float, step: float) -> str:
    if not math.isfinite(value):
        return " "
    return _BLOCKS[min(len(_BLOCKS) - 1, int((value - low) / step))] if step else _BLOCKS[len(_BLOCKS) // 2]


def _mean(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)
