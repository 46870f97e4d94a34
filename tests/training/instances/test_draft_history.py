"""Which steps' responses are kept to draft later ones from."""

import pytest

from rlhfless_operator.training.instances import draft_history
from rlhfless_operator.training.instances.draft_history import DraftHistory


def test_a_prompts_newest_visit_is_what_counts_and_the_newest_step_is_always_named() -> None:
    history = DraftHistory()
    history.generated(1, {0: [5], 1: [5]})
    history.generated(2, {2: [5], 3: [5]})
    history.generated(3, {0: [5], 3: [5]})
    assert history.kept == [1, 2, 3]
    assert history.steps_for([0]) == [3]
    assert history.steps_for([1, 2]) == [1, 2, 3]
    assert history.steps_for([9]) == [3]


def test_a_step_whose_prompts_have_all_been_visited_again_goes() -> None:
    history = DraftHistory()
    history.generated(1, {0: [5], 1: [5]})
    history.generated(2, {0: [5], 1: [5]})
    assert history.kept == [2]


def test_a_step_that_is_taken_again_counts_once() -> None:
    history = DraftHistory()
    history.generated(1, {0: [5]})
    history.generated(1, {0: [5]})
    assert history.kept == [1]


def test_no_more_tokens_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_history, "KEPT_TOKENS", 100)
    history = DraftHistory()
    for step in range(1, 9):
        history.generated(step, {step: [20, 20]})
    assert history.kept == [7, 8]
    history.generated(9, {9: [1000]})
    assert history.kept == [9]


def test_the_state_survives_a_driver() -> None:
    history, restored = DraftHistory(), DraftHistory()
    history.generated(1, {0: [5], 1: [5]})
    history.generated(2, {1: [7]})
    restored.restore(history.state())
    assert restored.state() == history.state()
    assert restored.steps_for([0]) == [1, 2]


def test_a_job_of_a_release_without_drafts_goes_on_without_a_history() -> None:
    history = DraftHistory()
    history.restore({})
    assert history.steps_for([1, 2]) == []
