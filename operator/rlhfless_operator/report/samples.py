"""The report's sample completions, before and after training side by side."""

from collections.abc import Sequence
from html import escape
from itertools import takewhile

from rlhfless_operator.formatting import format_number
from rlhfless_operator.records.record import SampleRecord

MOST_PROMPTS = 12
_SHORTEST_PREFIX = 40


def samples_section(samples: Sequence[SampleRecord]) -> str:
    """One card for each prompt; what all prompts begin with is shown once."""
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
            "<div>" + "".join(_sample(sample) for sample in mine if sample.when == when) + "</div>"
            for when in ("before", "after")
            if any(sample.when == when for sample in mine)
        )
        shown = escape(prompt[len(prefix) :])
        content += f'<div class="card"><pre>{shown}</pre><div class="pair">{columns}</div></div>'
    return f'<div class="stack">{content}</div>'


def shared_lines(prompts: Sequence[str]) -> str:
    """The whole lines that all of several prompts begin with, if that is long enough to be worth leaving out."""
    if len(prompts) < 2:
        return ""
    ranks = zip(*(prompt.splitlines(keepends=True) for prompt in prompts), strict=False)
    shared = "".join(lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, ranks))
    return shared if len(shared) >= _SHORTEST_PREFIX else ""


def _sample(sample: SampleRecord) -> str:
    if sample.reward is None:
        badge = '<span class="reward none">unscored</span>'
    else:
        level = "high" if sample.reward > 0 else "low"
        badge = f'<span class="reward {level}">{format_number(sample.reward)}</span>'
    length = f"{sample.tokens} tokens" + (f", {sample.finish_reason}" if sample.finish_reason else "")
    return (
        f'<p class="when" style="margin-top:8px">{sample.when} {badge} {escape(length)}</p>'
        f"<pre>{escape(sample.response)}</pre>"
    )
