"""The verdict on each pair of `pairs.jsonl`, which `benchmarks/peers/mathematics.py` compares with those of others."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.rewards.mathematics.scorer import is_right
from rlhfless_functions.rewards.mathematics.truths import readings_of

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "pairs.jsonl").read_text().splitlines()]
KINDS = {kind: list(pairs) for kind, pairs in groupby(PAIRS, key=lambda pair: pair["kind"])}


@pytest.mark.parametrize("kind", KINDS)
def test_each_answer_of_a_kind_gets_its_score(kind: str) -> None:
    def is_wrong(pair: dict[str, Any]) -> bool:
        return is_right(readings_of(pair["truth"]), pair["response"]) != bool(pair["score"])

    wrong = [pair for pair in KINDS[kind] if is_wrong(pair)]
    assert not wrong, "\n".join(map(str, wrong))


def test_there_are_enough_of_both_scores() -> None:
    scores = [pair["score"] for pair in PAIRS]
    assert min(scores.count(0), scores.count(1)) > 100 and min(map(len, KINDS.values())) >= 10
