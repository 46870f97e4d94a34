"""Pictures of the dashboards where there is no Grafana: `python charts/tools/pictures.py URL BEGIN END FOLDER`.

Asks the Prometheus at URL every panel's queries for a time (Unix seconds), draws the answers with the charts of the
report that a run leaves, and has chromium take a picture of each dashboard.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from dashboards import PAGES, Page, Panel, Query

from rlhfless_operator.formatting import format_number, format_percent
from rlhfless_operator.records.record import SpanRecord
from rlhfless_operator.report.charts import Series, line_chart, stacked_bars
from rlhfless_operator.report.gantt import gantt, lanes
from rlhfless_operator.report.page import page, tiles

POINTS = 300
_WIDTH, _ROW, _HEAD, _TILES = 1240, 315, 130, 100
_SCALE = 0.75
_STYLES = ("c1", "c2", "c3", "c4", "c5", "c6")


@dataclass(frozen=True)
class Watched:
    """A Prometheus and a time in which it watched."""

    url: str
    begin: float
    end: float

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return (self.end - self.begin) / (POINTS - 1)

    def instant(self, query: Query) -> dict[str, float]:
        """The value of each series at the end, by legend."""
        return {
            _legend(query, one): float(one["value"][1])
            for one in self._ask("query", query=self._filled(query), time=self.end)
        }

    def range(self, query: Query) -> dict[str, list[float]]:
        """The values of each series at every point, by legend; NaN where it has none."""
        span = {"start": self.begin, "end": self.end, "step": self.step}
        series = {}
        for one in self._ask("query_range", query=self._filled(query), **span):
            values = [math.nan] * POINTS
            for at, text in one["values"]:
                values[min(POINTS - 1, round((at - self.begin) / self.step))] = float(text)
            series[_legend(query, one)] = values
        return series

    def _filled(self, query: Query) -> str:
        text = query.expression.replace("$namespace", ".*").replace("$job", ".*")
        whole = f"{math.ceil(self.end - self.begin)}s"
        return text.replace("$window", "30s").replace("$__rate_interval", "3s").replace("$__range", whole)

    def _ask(self, path: str, **parameters: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            return json.load(answer)["data"]["result"]


def draw(name: str, content: Page, watched: Watched, folder: Path) -> None:
    """Write `dashboard-NAME.png`."""
    numbers = [panel for panel in content.panels if panel.kind == "number"]
    charts = [panel for panel in content.panels if panel.kind != "number"]
    body = f"<h1>{escape(content.title)}</h1>"
    body += tiles([(panel.title, _number(panel, watched), "") for panel in numbers]) if numbers else ""
    body += '<p></p><div class="charts">' + "".join(_chart(panel, watched) for panel in charts) + "</div>"
    with tempfile.TemporaryDirectory() as temporary:
        html = Path(temporary) / "page.html"
        html.write_text(page(content.title, body))
        picture = folder / f"dashboard-{name}.png"
        height = _HEAD + _TILES * bool(numbers) + _ROW * math.ceil(len(charts) / 2)
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--window-size={_WIDTH},{height}", f"--force-device-scale-factor={_SCALE}"]
        subprocess.run([*command, f"--screenshot={picture}", html.as_uri()], check=True, capture_output=True)


def _number(panel: Panel, watched: Watched) -> str:
    (value,) = watched.instant(panel.queries[0]).values()
    return _shown(value, panel.unit)


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return format_percent(value)
    return f"{format_number(value)}{' s' if unit == 's' else ''}"


def _chart(panel: Panel, watched: Watched) -> str:
    if panel.kind == "bars":
        found = sorted(watched.instant(panel.queries[0]).items(), key=lambda entry: -entry[1])
        rows = "".join(f"<tr><td>{escape(name)}</td><td>{_shown(value, panel.unit)}</td></tr>" for name, value in found)
        return f"<figure><figcaption>{escape(panel.title)}</figcaption><table>{rows}</table></figure>"
    series = {name: values for query in panel.queries for name, values in watched.range(query).items()}
    lines = [Series(name, series[name], _STYLES[number % 6]) for number, name in enumerate(sorted(series))]
    xs = [number * watched.step for number in range(POINTS)]
    if panel.kind == "states":
        chart = gantt(lanes(_at_work(series, watched.step)), 0.0, watched.end - watched.begin)
        return f'<figure style="grid-column: 1 / -1"><figcaption>{escape(panel.title)}</figcaption>{chart}</figure>'
    draw_it = stacked_bars if panel.kind == "stack" else line_chart
    return draw_it(xs, lines, title=panel.title, x_name="seconds")


def _at_work(series: dict[str, list[float]], step: float) -> list[SpanRecord]:
    """When each stage had instances at work."""
    spans = []
    for name, values in series.items():
        for working, points in groupby(enumerate(values), lambda point: point[1] > 0.01):
            if working:
                numbers = [number for number, _ in points]
                start, end = numbers[0] * step, (numbers[-1] + 1) * step
                spans.append(SpanRecord(instance=name, stage=name, state="busy", start=start, end=end))
    return spans


def _legend(query: Query, result: dict[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: result["metric"].get(match[1], ""), query.legend)


if __name__ == "__main__":
    url, begin, end, folder = sys.argv[1:]
    for each, content in PAGES.items():
        draw(each, content, Watched(url, float(begin), float(end)), Path(folder))
