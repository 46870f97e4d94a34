"""Ground truths as mathematics."""

import threading
from typing import Any

from math_verify.errors import TimeoutException
from math_verify.utils import timeout

from rlhfless_functions.rewards.mathematics.answers import truth_of
from rlhfless_functions.rewards.mathematics.shapes import Reading
from rlhfless_functions.rewards.truths import UnreadableTruthError, accepted_as_text

_SECONDS = 5
"""Time limit for reading one ground truth, in seconds."""


def readings_of(truth: Any) -> list[Reading]:
    """Return the readings of a ground truth, of which each is right.

    Raises:
        UnreadableTruthError: it is missing, or not mathematics as a whole; the message is what it is.
    """
    return [_reading(text) for text in accepted_as_text(truth)]


def _reading(text: str) -> Reading:
    # An alarm needs the main thread. Reading does not compute, so the limit is for texts of hostile forms only.
    in_main = threading.current_thread() is threading.main_thread()
    try:
        found = timeout(_SECONDS)(truth_of)(text) if in_main else truth_of(text)
    except TimeoutException:
        found = None
    if found is None:
        raise UnreadableTruthError(
            "is not mathematics as a whole: write the answer alone, as LaTeX between $ if it has more than numbers"
        )
    return found
