"""The report's samples: before and after training side by side, and during training."""

from collections.abc import Sequence
from html import escape
from itertools import takewhile

from rlhfless_operator.formatting import format_number
from rlhfless_operator.records.record import SampleRecord

MOST_PROMPTS = 12
MOST_STEPS = 16
_SHORTEST_PREFIX = 40
_SPEAKERS = {"assistant": "model", "tool": "environment", "user": "environment"}


def samples_section(samples: Sequence[SampleRecord]) -> str:
    """Return one card for each prompt of the evaluations. If all prompts begin alike, the beginning is shown once."""
    samples = [sample for sample in samples if sample.when != "training"]
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))[:MOST_PROMPTS]
    if not prompts:
        return ""
    prefix = shared_lines(prompts)
    content = (
        f'<div class="card"><p class="when">Every prompt begins with</p><pre>{escape(prefix)}</pre></div>'
        if prefix
        else ""
    )
    for prompt in prompts:
        mine = [sample for sample in samples if sample.prompt == prompt]
        columns = "".join(
            "<div>" + "".join(_sample(sample, when) for sample in mine if sample.when == when) + "</div>"
            for when in ("before", "after")
            if any(sample.when == when for sample in mine)
        )
        shown = escape(prompt[len(prefix) :])
        content += f'<div class="card"><pre>{shown}</pre><div class="pair">{columns}</div></div>'
    return f'<div class="stack">{content}</div>'


def training_section(samples: Sequence[SampleRecord]) -> str:
    """Return a card for each group of some steps, spread over the run. The first and the last card are open."""
    samples = [sample for sample in samples if sample.when == "training"]
    steps = _spread(sorted({sample.step for sample in samples}), MOST_STEPS)
    cards = [
        _group(step, [sample for sample in samples if (sample.step, sample.row) == (step, row)], step in _ends(steps))
        for step in steps
        for row in dict.fromkeys(sample.row for sample in samples if sample.step == step)
    ]
    return f'<div class="stack">{"".join(cards)}</div>' if cards else ""


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Choose a limited number of the steps at even distances, including the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _ends(steps: Sequence[int]) -> set[int]:
    return {steps[0], steps[-1]}


def _group(step: int, group: Sequence[SampleRecord], is_open: bool) -> str:
    badges = " ".join(_badge(sample.reward) for sample in group)
    cards = "".join(_sample(sample, f"sample {sample.index}") for sample in group)
    return (
        f'<details class="card"{" open" if is_open else ""}><summary>step {step}, prompt {group[0].row} {badges}'
        f'</summary><p class="when">prompt</p><pre>{escape(group[0].prompt)}</pre>{cards}</details>'
    )


def shared_lines(prompts: Sequence[str]) -> str:
    """Return the whole lines with which all prompts begin, if they are long enough to omit."""
    if len(prompts) < 2:
        return ""
    ranks = zip(*(prompt.splitlines(keepends=True) for prompt in prompts), strict=False)
    shared = "".join(lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, ranks))
    return shared if len(shared) >= _SHORTEST_PREFIX else ""


def _sample(sample: SampleRecord, label: str) -> str:
    parts = [f"{sample.tokens} tokens"]
    if sample.finish_reason:
        parts.append(sample.finish_reason)
    if len(sample.terms) > 1:
        parts += [f"{name} {_number(score)}" for name, score in sample.terms.items()]
    if sample.advantage is not None:
        parts.append(f"advantage {format_number(sample.advantage)}")
    return (
        f'<p class="when" style="margin-top:8px">{label} {_badge(sample.reward)} {escape(", ".join(parts))}</p>'
        f"{_said(sample)}"
    )


def _said(sample: SampleRecord) -> str:
    """Return a response: of an episode, each message under its speaker."""
    if not sample.messages:
        return f"<pre>{escape(sample.response)}</pre>"
    return "".join(
        f'<p class="when">{escape(_SPEAKERS.get(role := str(message.get("role")), role))}</p>'
        f"<pre>{escape(str(message.get('content', '')))}</pre>"
        for message in sample.messages
    )


def _badge(reward: float | None) -> str:
    if reward is None:
        return '<span class="reward none">unscored</span>'
    return f'<span class="reward {"high" if reward > 0 else "low"}">{format_number(reward)}</span>'


def _number(score: float | None) -> str:
    return "unscored" if score is None else format_number(score)
