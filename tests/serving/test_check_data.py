"""A dataset read for `rlhfless validate --data`: its first prompts, and every fault at once."""

from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api.data_check import DataCheck, DataCheckResult
from rlhfless_functions.serving.check_data import check_data
from rlhfless_functions.settings import DataSettings, ModelSettings, RewardSettings, SamplingSettings
from tests.data.reading import write_jsonl

MATH = RewardSettings(name="right", math={})
EXACT = RewardSettings(name="same", exact_match={})
GOOD = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(5)]


@pytest.fixture
def check(tiny_model: Path) -> Any:
    """Checks sources with the tiny model."""

    def answer(*sources: str, rewards: Any = (MATH,), **given: Any) -> DataCheckResult:
        data = DataSettings(sources=[{"source": source} for source in sources])
        model = ModelSettings(source=str(tiny_model), dtype="float32")
        fields = {"sampling": SamplingSettings(max_prompt_tokens=16, max_response_tokens=16), "prompts": 2, **given}
        return check_data(DataCheck(model=model, data=data, rewards=list(rewards), **fields))

    return answer


def test_the_first_prompts_of_each_source_are_those_of_training(check: Any, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "", "answer": "1"}, *GOOD])
    second = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x" * 17, "answer": "1"}, {"prompt": "2\n", "answer": 2}])
    result = check(first, second)
    assert result.faults == []
    assert [(each.source, each.row, each.text, each.tokens, each.ground_truth) for each in result.prompts] == [
        (first, 0, "0+1=", 4, "1"),
        (first, 1, "1+1=", 4, "2"),
        (second, 5, "2\n", 2, 2),
    ]
    assert (result.counts.rows, result.counts.empty, result.counts.too_long) == (8, 1, 1)


def test_what_a_tokenizer_cannot_hold_is_seen(check: Any, tmp_path: Path) -> None:
    """The text is that of the tokens, not that of the file."""
    (prompt,) = check(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2 × 3", "answer": "6"}])).prompts
    assert prompt.text == "2 <pad> 3"


def test_every_source_and_reward_tells_its_own_fault_and_prompts_are_shown_beside_them(
    check: Any, tmp_path: Path
) -> None:
    odd = write_jsonl(tmp_path / "odd.jsonl", [*GOOD, {"prompt": "1", "answer": "the cat, 3"}, {"prompt": "2"}])
    none = write_jsonl(tmp_path / "none.jsonl", [{"prompt": "1"}])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{oops\n")
    result = check(odd, none, str(broken), str(tmp_path / "missing.jsonl"), rewards=(MATH, EXACT))
    assert result.counts is None
    assert [each.text for each in result.prompts] == ["0+1=", "1+1=", "1"]
    text = "\n".join(result.faults)
    assert "broken.jsonl, line 1 is not JSON" in text
    assert "missing.jsonl" in text
    for reward in ("'right' (math)", "'same' (exactMatch)"):
        assert f"line 7 has no ground truth in column 'answer', which reward {reward} needs" in text
        assert f"{none} has no ground truth (no column ground_truth, expected_answer" in text
    assert len(result.faults) == len(set(result.faults)) == 6


def test_truths_that_cannot_be_read_are_named_with_their_lines(check: Any, tmp_path: Path) -> None:
    odd = [{"prompt": "1", "answer": "3 +"}, {"prompt": "1", "answer": ""}]
    result = check(write_jsonl(tmp_path / "odd.jsonl", [*GOOD, *odd]))
    (fault,) = result.faults
    assert "2 ground truths in column 'answer' that reward 'right' (math) can't read" in fault
    assert "line 6: '3 +'" in fault and "line 7: ''" in fault
    assert "set the reward's onError to unscorable" in fault
    assert len(result.prompts) == 2


def test_sources_that_are_wrong_only_together_are_refused(check: Any, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*GOOD, {"prompt": "", "answer": "1"}])
    (fault,) = check(source, most_dropped=0.1).faults
    assert "more than the share limits.droppedPrompts (0.1)" in fault


def test_a_model_without_tokenizer_is_a_fault_beside_those_of_the_data(check: Any, tmp_path: Path) -> None:
    model = ModelSettings(source=str(tmp_path), dtype="float32")
    data = DataSettings(source=str(tmp_path / "missing.jsonl"))
    result = check_data(DataCheck(model=model, data=data, sampling=SamplingSettings()))
    assert len(result.faults) == 2
    assert "missing.jsonl" in result.faults[0]
