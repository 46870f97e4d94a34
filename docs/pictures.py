"""The SVG pictures of docs/images: `python docs/pictures.py` draws them from the results in benchmarks/.

`python docs/pictures.py step money` draws only these. They are dark for a reader whose system is.
"""

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhfless_functions.api import STAGES
from rlhfless_operator.records.record import SpanRecord
from rlhfless_operator.report.gantt import lanes, window

_DOCS = Path(__file__).resolve().parent
_BENCHMARKS = _DOCS.parent / "benchmarks"
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 900, 130, 30, 24, 46
_CENTS_AN_HOUR = 10
"""Price of an instance in examples/quickstart/grpo.yaml."""
_STYLE = """
text { font: 13px sans-serif; fill: #24292f } .small { font-size: 12px; fill: #57606a } .title { font-weight: bold }
.panel { fill: #ffffff } .grid { stroke: #d0d7de } .lane { fill: #f2f4f6 }
.generation, .job0 { fill: #2f6fd0 } .preparation, .job1 { fill: #c77700 } .learning, .job2 { fill: #2b8a4b }
.starting { fill: #b08ad9 } .idle { fill: #b9c0c8 } .switching { fill: #d9406a } .draining { fill: #7a828b }
g.generation { color: #2f6fd0 } g.preparation { color: #c77700 } g.learning { color: #2b8a4b }
.busy { fill: #2f6fd0 } .inside { fill: #ffffff; font-size: 11px }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9da7b1 } .panel { fill: #0d1117 } .grid { stroke: #30363d }
.lane { fill: #161b22 } .idle { fill: #59626c } .draining { fill: #8b949e } .inside { fill: #ffffff } }
"""


def svg(title: str, height: float, body: str) -> str:
    """A picture on a panel of its own, which is readable on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img">'
        f'<title>{escape(title)}</title><style>{_STYLE}</style><rect class="panel" width="100%" height="100%" rx="6"/>'
        f'<text class="title" x="14" y="24">{escape(title)}</text>{body}</svg>\n'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle of one class, with a tooltip."""
    tip = f"<title>{escape(title)}</title>" if title else ""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {size}>{tip}</rect>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def legend(kinds: Sequence[tuple[str, str]], y: float) -> str:
    """Colours with their names."""
    x, body = float(_LEFT), ""
    for kind, name in kinds:
        body += rect(x, y - 10, 12, 12, kind) + text(x + 17, y, name, "small")
        x += 17 + 7 * len(name) + 22
    return body


def axis(start: float, end: float, bottom: float, unit: str = "seconds") -> str:
    """Lines and numbers of a time axis that begins with 0 at `start`."""
    length = end - start
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if length / step <= 9)
    body = ""
    for tick in range(0, int(length) + 1, step):
        x = place(start + tick, start, end)
        body += f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom:.1f}"/>'
        body += text(x, bottom + 16, str(tick), "small", "middle")
    return body + text(_WIDTH - _RIGHT, bottom + 32, unit, "small", "end")


def place(at: float, start: float, end: float) -> float:
    """Where a moment is from left to right."""
    return _LEFT + (min(max(at, start), end) - start) / (end - start) * (_WIDTH - _LEFT - _RIGHT)


def timeline(title: str, rows: Sequence[tuple[str, Sequence[dict[str, Any]]]], keys: Sequence[tuple[str, str]]) -> str:
    """Rows of spans, each with `start`, `end`, `kind` and `says`."""
    spans = [span for _, row in rows for span in row]
    start, end = min(span["start"] for span in spans), max(span["end"] for span in spans)
    bottom = _TOP + _ROW * len(rows)
    body = axis(start, end, bottom)
    for number, (name, row) in enumerate(rows):
        y = _TOP + _ROW * number
        body += text(_LEFT - 10, y + 15, name, "", "end")
        for span in row:
            left, right = place(span["start"], start, end), place(span["end"], start, end)
            body += rect(left, y + 2, right - left, _ROW - 5, span["kind"], span["says"])
            if (letter := span.get("letter")) and right - left > 14:
                body += text((left + right) / 2, y + 14, letter, "inside", "middle")
    return svg(title, bottom + 64, body + legend(keys, bottom + 50))


def step() -> str:
    """The first two steps of the rehearsed job."""
    spans = [SpanRecord(**span) for span in _read("simulator", "rehearsal")["spans"] if span["state"] != "asleep"]
    ends = sorted(span.end for span in spans if (span.stage, span.state) == ("learning", "busy"))
    rows = []
    for lane in window(lanes(spans), min(span.start for span in spans if span.state == "busy"), ends[1]):
        name = f"actor {lane.number}" if lane.stage == "generation" else lane.stage
        rows.append((name, [_state(span) for span in lane.spans]))
    kinds = [(stage, f"{stage} at work") for stage in STAGES]
    kinds += [(state, state) for state in ("starting", "idle", "draining")]
    return timeline("Two steps: who holds a GPU, and what for", [row for row in rows if row[1]], kinds)


def _state(span: SpanRecord) -> dict[str, Any]:
    kind = span.stage if span.state == "busy" else span.state
    says = f"{span.stage}, {span.state}, {span.end - span.start:.1f} s"
    return {"start": span.start, "end": span.end, "kind": kind, "says": says}


def messages() -> str:
    """The messages of one step, from top to bottom."""
    names = ("driver", "generation", "preparation", "learning", "artifact store")
    driver, generation, preparation, learning, store = (70.0 + 190 * number for number in range(len(names)))
    told = [
        (driver, driver, "draw prompts, predict lengths, plan shares"),
        (driver, generation, "one request per actor: share, weights version, seed, sink"),
        (store, generation, "weights version k−1, if another is loaded"),
        (generation, store, "rollout parts: token ids, log-probabilities"),
        (generation, driver, "events: progress, sample"),
        (driver, preparation, "a chunk of complete groups"),
        (preparation, store, "rewards, reference log-probabilities, values, advantages"),
        (preparation, driver, "done: what each group came to"),
        (generation, driver, "done; the instance is released at once"),
        (driver, learning, "one request: batch, base version, checkpoint (earlier with learning.overlap)"),
        (learning, store, "weights version k, every few steps a checkpoint"),
        (learning, driver, "done: metrics"),
        (driver, store, "records, position, and last the status: with it the step is done"),
    ]
    looped, row = range(3, 8), 34
    top = _TOP + 30
    bottom = top + row * len(told)
    body = rect(10, top + row * looped[0] - 8, _WIDTH - 20, row * len(looped), "lane")
    body += text(16, top + row * looped[0] + 8, "as samples finish", "small")
    for name, x in zip(names, (driver, generation, preparation, learning, store), strict=True):
        body += text(x, top - 16, name, "title", "middle")
        body += f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom:.1f}"/>'
    for number, (start, end, words) in enumerate(told):
        y = top + row * number + 16
        if start == end:
            body += text(start + 8, y, words, "small")
            continue
        ahead = 6 if end > start else -6
        kind = {generation: "generation", preparation: "preparation", learning: "learning"}
        body += f'<g class="{kind.get(start) or kind.get(end) or "small"}" stroke="currentColor" fill="currentColor">'
        body += f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y + 4}" y2="{y + 4}"/>'
        body += f'<path d="M{end:.1f} {y + 4} l{-ahead} -4 v8 z"/></g>'
        if start == learning and end == store:
            body += text(end - 10, y - 2, words, "small", "end")
        else:
            body += text(min(start, end) + 10, y - 2, words, "small")
    return svg("One step", bottom + 16, body)


def slots() -> str:
    """Two jobs on the same slots, from when both learn until the first one has ended."""
    found = _read("cluster", "slot_spans")
    busy = [span for span in found["spans"] if span["state"] == "busy"]
    jobs = {span["job"] for span in busy}
    begin = max(
        min(span["start"] for span in busy if (span["job"], span["stage"]) == (job, "learning")) for job in jobs
    )
    end = min(max(span["end"] for span in busy if span["job"] == job) for job in jobs)
    rows = []
    for number, slot in enumerate(sorted({slot for span in found["spans"] for slot in span["slots"]}), start=1):
        row = []
        for span in found["spans"]:
            held = span["state"] in ("busy", "switching", "idle")
            shown = held and span["end"] > begin and span["start"] < end
            if slot in span["slots"] and shown:
                kind = f"job{span['job'][-1]}" if span["state"] == "busy" else span["state"]
                letter = span["stage"][0].upper() if span["state"] == "busy" else ""
                says = f"{span['job']}, {span['stage']}, {span['state']}, {span['end'] - span['start']:.1f} s"
                part = {"start": max(span["start"], begin), "end": min(span["end"], end)}
                row.append(part | {"kind": kind, "says": says, "letter": letter})
        rows.append((f"slot {number}", row))
    kinds = [("job0", "first job"), ("job1", "second job"), ("switching", "one falls asleep, another wakes")]
    kinds += [("idle", "idle")]
    title = "Two jobs on four GPUs: G generation, P preparation, L learning"
    return timeline(title, rows, kinds)


def money() -> str:
    """What the quickstart cost on one machine and on a cluster, by stage and by what its instances did."""
    found = _read("quickstart", "quickstart_cost")
    bars = [
        (f"{place}, {stage}", {state: seconds * _CENTS_AN_HOUR / 3600 for state, seconds in states.items()})
        for place, name in (("one machine", "laptop"), ("cluster", "cluster"))
        for stage, states in found[name]["instance_seconds"].items()
    ]
    most, left = max(sum(bar.values()) for _, bar in bars), 200.0
    body = ""
    for number, (name, bar) in enumerate(bars):
        y, x = _TOP + 30 * number + 10 * (number // len(STAGES)), left
        body += text(left - 10, y + 16, name, "", "end")
        for state, cents in bar.items():
            if cents:
                width = cents / most * (_WIDTH - left - 110)
                body += rect(x, y, width, 22, state, f"{state}: {cents:.2f} cents")
                x += width
        body += text(x + 8, y + 16, f"{sum(bar.values()):.2f} cents")
    bottom = _TOP + 30 * len(bars) + 30
    kinds = [(state, "at work" if state == "busy" else state) for state in ("starting", "busy", "idle", "draining")]
    return svg("What a run of the quickstart costs, by stage", bottom + 16, body + legend(kinds, bottom))


def asynchronous() -> str:
    """Accuracy against time, of jobs that differ in `async` alone."""
    seconds = _read("asynchronous", "async_against_sync_groups")["runs"]
    runs = _read("asynchronous", "accuracy_over_time")["jobs"]
    arms = (("static", "synchronous", "learning"), ("async-1", "maxStaleness: 1", "generation"))
    arms += (("async-2", "maxStaleness: 2", "preparation"),)
    curves = {
        (name, kind): [(int(step) * seconds[arm]["step_seconds"] / 60, each) for step, each in runs[arm].items()]
        for arm, name, kind in arms
    }
    end, height, low, high = max(at for curve in curves.values() for at, _ in curve), 300.0, 0.3, 1.0
    bottom = _TOP + height
    body = axis(0, end, bottom, "minutes")
    for tenth in range(3, 11):
        y = bottom - (tenth / 10 - low) / (high - low) * height
        body += f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        body += text(_LEFT - 10, y + 4, f"{tenth / 10:.1f}", "small", "end")
    for (name, kind), curve in curves.items():
        points = [(place(at, 0, end), bottom - (each - low) / (high - low) * height, at, each) for at, each in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        body += f'<g class="{kind}"><polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/></g>'
        for x, y, at, each in points:
            body += rect(x - 3, y - 3, 6, 6, kind, f"{name}: {each:.3f} after {at:.0f} minutes")
    keys = [(kind, name) for name, kind in curves]
    return svg("Held-out accuracy against time", bottom + 64, body + legend(keys, bottom + 50))


def _read(room: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_BENCHMARKS / room / "results" / f"{name}.json").read_text())
    return found


PICTURES = {"step": step, "messages": messages, "slots": slots, "money": money, "asynchronous": asynchronous}


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description="Draw the SVG pictures of the docs.")
    parser.add_argument("pictures", nargs="*", help="all if left out")
    given = parser.parse_args()
    if unknown := set(given.pictures) - set(PICTURES):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    for name in given.pictures or PICTURES:
        (_DOCS / "images" / f"{name}.svg").write_text(PICTURES[name]())


if __name__ == "__main__":
    main()
