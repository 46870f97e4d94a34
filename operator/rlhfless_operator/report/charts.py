"""Charts: pure functions from numbers to HTML with inline SVG.

Only marks are SVG, in a box that stretches with the page. The labels around it are HTML and keep their size on every
screen. There is no script: tooltips (`<title>`) show exact values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlhfless_operator.formatting import averaged, format_number

POINTS = 400
"""Most points of a drawn line. A longer line is averaged over neighbouring points."""

_WIDTH, _HEIGHT = 1000.0, 400.0
_MOST = 1e300
"""Largest value that is drawn. Twice the largest float is infinite, and so are such a chart's ticks."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    """Name in the legend and in tooltips."""
    values: Sequence[float]
    """One value for each x. What is not finite, or beyond ±1e300, is a gap."""
    style: str
    """Class of the style sheet: `c1` … `c6`, and `faint` for a background line."""


@dataclass(frozen=True)
class Mark:
    """A single point on a chart, such as an evaluation."""

    x: float
    y: float
    title: str
    """Text of the tooltip."""


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) that cover `low` to `high`; at least two."""
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if abs(high) > 1e-12 else (0.0, 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def line_chart(
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    title: str,
    note: str = "",
    x_name: str = "step",
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
) -> str:
    """Draw lines over a common axis.

    Args:
        xs: x of every value: whole numbers, ascending, as many as each series has values.
        series: the lines.
        title: heading of the chart.
        note: a sentence under the heading.
        x_name: what x counts.
        marks: single points.
        from_zero: whether the y axis begins at zero.

    Returns:
        A `<figure>`, with a sentence instead of the plot if no value is finite.
    """
    count = min(len(xs), POINTS)
    thin_xs = averaged(xs, count)
    thinned = [Series(line.name, averaged(_drawable(line.values), count), line.style) for line in series]
    marks = [mark for mark in marks if abs(mark.y) <= _MOST]
    finite = [value for line in thinned for value in line.values if math.isfinite(value)]
    finite += [mark.y for mark in marks]
    if not finite:
        return _figure(title, note, "", '<p class="none">No values.</p>')
    y_ticks = ticks(min(0.0, *finite) if from_zero else min(finite), max(finite))
    scale = _Scale(*_x_range([*thin_xs, *(mark.x for mark in marks)]), y_ticks[0], y_ticks[-1])
    body = "".join(_grid_line(scale, tick) for tick in y_ticks)
    body += "".join(f'<path class="line {line.style}" d="{_path(thin_xs, line.values, scale)}"/>' for line in thinned)
    body += "".join(_mark(mark, scale) for mark in marks)
    body += _hover_bands(thin_xs, thinned, scale, x_name)
    keys = legend([(line.name, line.style) for line in series]) if len(series) > 1 else ""
    labels = [(scale.x(tick) / _WIDTH, format_number(tick)) for tick in _whole_ticks(scale.x_low, scale.x_high)]
    return _figure(title, note, keys, _framed(body, scale, y_ticks, labels, x_name))


def stacked_bars(xs: Sequence[float], series: Sequence[Series], *, title: str, note: str = "", unit: str = "") -> str:
    """Draw a bar of non-negative parts for each step. The parts are stacked in the order of the series."""
    count = min(len(xs), POINTS // 2)
    thin_xs = averaged(xs, count)
    thinned = [Series(line.name, averaged(_drawable(line.values), count), line.style) for line in series]
    totals = [sum(part for part in parts if part > 0) for parts in zip(*(line.values for line in thinned), strict=True)]
    if not any(totals):
        return _figure(title, note, "", '<p class="none">No values.</p>')
    y_ticks = ticks(0.0, max(totals))
    scale = _Scale(0.0, float(len(thin_xs)), 0.0, y_ticks[-1])
    body = "".join(_grid_line(scale, tick) for tick in y_ticks)
    for index, x in enumerate(thin_xs):
        left, right = scale.x(index + 0.12), scale.x(index + 0.88)
        base = 0.0
        parts = ""
        for line in thinned:
            value = line.values[index]
            if value > 0:
                top, bottom = scale.y(base + value), scale.y(base)
                parts += _rectangle(left, top, right - left, bottom - top, f"fill {line.style}")
                base += value
        lines = [f"step {x:.0f}: {format_number(base)}{unit}"]
        lines += [f"{line.name}: {format_number(line.values[index])}{unit}" for line in thinned]
        body += f"<g><title>{escape(chr(10).join(lines))}</title>{parts}</g>"
    keys = legend([(line.name, line.style) for line in series])
    low, high = _x_range(thin_xs)
    labels = [
        (((tick - low) / (high - low) * (len(thin_xs) - 1) + 0.5) / len(thin_xs), f"{tick:.0f}")
        for tick in _whole_ticks(low, high)
    ]
    return _figure(title, note, keys, _framed(body, scale, y_ticks, labels, "step"))


def share_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Draw one horizontal bar of parts of a whole.

    Args:
        parts: (name, amount, style class); amounts are not negative.
    """
    total = sum(amount for _, amount, _ in parts) or 1.0
    body, left = "", 0.0
    for name, amount, style in parts:
        width = 1000 * amount / total
        title = escape(f"{name}: {100 * amount / total:.1f} %")
        body += f"<g><title>{title}</title>{_rectangle(left, 0, width, 10, f'fill {style}')}</g>"
        left += width
    return f'<svg class="share" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img">{body}</svg>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Say what each color means.

    Args:
        entries: (name, style class).
    """
    keys = "".join(f'<span><i class="key {style}"></i>{escape(name)}</span>' for name, style in entries)
    return f'<div class="legend">{keys}</div>'


def spark(values: Sequence[float]) -> str:
    """Draw a small line without axes."""
    thin = averaged(_drawable(values), 100)
    finite = [value for value in thin if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    scale = _Scale(0.0, float(len(thin) - 1), low, high if high > low else low + max(1.0, abs(low)))
    path = _path([float(index) for index in range(len(thin))], thin, scale)
    box = f"-10 -20 {_WIDTH + 20:.0f} {_HEIGHT + 40:.0f}"
    return (
        f'<svg class="spark" viewBox="{box}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line c1" d="{path}"/></svg>'
    )


@dataclass(frozen=True)
class _Scale:
    """Converts data to coordinates in the drawing's box."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _WIDTH * (value - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return _HEIGHT * (1 - (value - self.y_low) / (self.y_high - self.y_low))


def _drawable(values: Sequence[float]) -> list[float]:
    return [value if abs(value) <= _MOST else math.nan for value in values]


def _x_range(xs: Sequence[float]) -> tuple[float, float]:
    return (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)


def _whole_ticks(low: float, high: float) -> list[float]:
    """Return the ticks at whole numbers within the range."""
    return [tick for tick in ticks(low, high, 5) if low <= tick <= high and tick == int(tick)]


def _path(xs: Sequence[float], ys: Sequence[float], scale: _Scale) -> str:
    """Move and line commands of a path. A value that is not finite breaks the line; a single value is a dot."""
    commands: list[str] = []
    pen_down = False
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            pen_down = False
            continue
        point = f"{scale.x(x):.1f} {scale.y(y):.1f}"
        # A zero-length line with round caps makes a single point visible.
        commands.append(f"L{point}" if pen_down else f"M{point}L{point}")
        pen_down = True
    return "".join(commands)


def _mark(mark: Mark, scale: _Scale) -> str:
    x, y = f"{scale.x(mark.x):.1f}", f"{scale.y(mark.y):.1f}"
    return f'<path class="mark" d="M{x} {y}L{x} {y}"><title>{escape(mark.title)}</title></path>'


def _hover_bands(xs: Sequence[float], series: Sequence[Series], scale: _Scale, x_name: str) -> str:
    """Return one invisible column for each x that shows the values there."""
    bands = ""
    for index, x in enumerate(xs):
        left = scale.x((xs[index - 1] + x) / 2) if index else scale.x(x)
        right = scale.x((xs[index + 1] + x) / 2) if index + 1 < len(xs) else scale.x(x)
        lines = [f"{x_name} {x:.0f}"]
        lines += [
            f"{line.name}: {format_number(line.values[index])}" for line in series if math.isfinite(line.values[index])
        ]
        title = escape("\n".join(lines))
        bands += f'<rect class="hover" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{_HEIGHT:.0f}">'
        bands += f"<title>{title}</title></rect>"
    return bands


def _grid_line(scale: _Scale, tick: float) -> str:
    y = scale.y(tick)
    return f'<path class="grid" d="M0 {y:.1f}H{_WIDTH:.0f}"/>'


def _rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _framed(
    body: str, scale: _Scale, y_ticks: Sequence[float], x_labels: Sequence[tuple[float, str]], x_name: str
) -> str:
    """Return the drawing with its labels: y on the left, x below."""
    y_labels = "".join(
        f'<span style="top:{100 * scale.y(tick) / _HEIGHT:.2f}%">{format_number(tick)}</span>' for tick in y_ticks
    )
    widest = max(len(format_number(tick)) for tick in y_ticks)
    columns = "".join(f'<span style="left:{100 * share:.2f}%">{text}</span>' for share, text in x_labels)
    return (
        f'<div class="plot" style="--labels:{widest}ch"><div class="y">{y_labels}</div>'
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img">{body}</svg>'
        f'<div class="x">{columns}</div><div class="xname">{escape(x_name)}</div></div>'
    )


def _figure(title: str, note: str, keys: str, content: str) -> str:
    comment = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{comment}{keys}{content}</figure>"
