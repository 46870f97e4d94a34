"""What a user is told to do about a fault."""

from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.reading.remedies import PATTERN_REMEDIES
from rlhfless_operator.job.spec import RLHFJob


def test_every_pattern_has_words_for_what_it_asks() -> None:
    patterned = {
        ".".join(path).replace("[]", "")
        for path, field in walk(RLHFJob)
        if any(getattr(part, "pattern", None) for part in field.info.metadata)
    }
    assert patterned == set(PATTERN_REMEDIES)
