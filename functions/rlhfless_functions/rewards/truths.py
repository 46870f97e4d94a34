"""The texts that are right by a ground truth of any form. Workers import this: standard library only."""

import json
import math
from collections.abc import Iterator
from typing import Any

_ANSWER_KEYS = ("ground_truth", "target", "answer", "answers", "value", "text", "aliases", "normalized_aliases")
"""Keys of a dict that hold right answers: Search-R1's `target`, SQuAD's `text`, TriviaQA's `value` and `aliases`."""
_OTHER_KEYS = frozenset(
    {"answer_start", "type", "style", "matched_wiki_entity_name", "normalized_matched_wiki_entity_name"}
    | {"normalized_value"}
)
"""Keys beside them that do not change what is right."""
_MOST_EXACT = 2**53
"""Integers of at most this size are exact as floats."""


class UnreadableTruthError(LookupError):
    """A ground truth does not say what is right. The message is what it is: `is empty`."""


def accepted(truth: Any) -> list[str]:
    """Return the texts of which each is a right answer.

    Any element of a list is right, and any of a dict's answers. A float that is an integer is written as one too, and
    True is `True`, `true`, `Yes` or `yes`.

    Raises:
        UnreadableTruthError: it is missing, NaN or empty, or a dict with keys of unknown meaning.
    """
    texts = list(dict.fromkeys(_texts(truth)))
    if not texts:
        raise UnreadableTruthError("is NaN or empty, which is no answer: write the answer, or remove the row")
    return texts


def accepted_as_text(truth: Any) -> list[str]:
    """Return the same for a column whose text may hold a list as JSON, such as `["\\\\frac{1}{2}", "0.5"]`.

    Raises:
        UnreadableTruthError: see `accepted`.
    """
    if isinstance(truth, str) and truth.strip().startswith('["'):
        try:
            held = json.loads(truth)
        except ValueError:
            return accepted(truth)
        return accepted(held)
    return accepted(truth)


def _texts(truth: Any) -> Iterator[str]:
    if truth is None:
        return
    if isinstance(truth, bool):
        yield from ("True", "true", "Yes", "yes") if truth else ("False", "false", "No", "no")
    elif isinstance(truth, float):
        if math.isnan(truth):
            return
        if truth.is_integer() and abs(truth) <= _MOST_EXACT:
            yield str(int(truth))
        yield str(truth)
    elif isinstance(truth, list | tuple):
        for each in truth:
            yield from _texts(each)
    elif isinstance(truth, dict):
        unknown = sorted(set(truth) - set(_ANSWER_KEYS) - _OTHER_KEYS)
        if unknown:
            raise UnreadableTruthError(f"is a dict whose keys {', '.join(unknown)} mean nothing to this reward")
        for key in _ANSWER_KEYS:
            yield from _texts(truth.get(key))
    elif (text := str(truth).strip()) and text.lower() != "nan":
        yield text
