"""The part of a response that answers."""

import pytest

from rlhfless_functions.rewards.thoughts import answer_span


@pytest.mark.parametrize(
    ("response", "prompt", "answer"),
    [
        ("42", "q", "42"),
        ("", "q", ""),
        ("<think>a</think>42", "q", "42"),
        ("a</think>42", "q <think>\n", "42"),
        ("a</think>42", "q", "42"),
        ("<think>a</think>b<think>c</think>42", "q", "42"),
        ("<think>a</think>42<think>b", "q", "42"),
        ("<reasoning>a</reasoning>42", "q", "42"),
        ("[THINK]a[/THINK]42", "q", "42"),
        ("<|begin_of_thought|>a<|end_of_thought|>42", "q", "42"),
        ("◁think▷a◁/think▷42", "q", "42"),
        ("42", "write your thoughts between <think> and </think>", "42"),
        ("42", "q <think>\n\n</think>\n\n", "42"),
        ("42</think>", "q", ""),
    ],
)
def test_the_answer_follows_the_thoughts(response: str, prompt: str, answer: str) -> None:
    span = answer_span(response, prompt)
    assert span is not None and response[slice(*span)] == answer


@pytest.mark.parametrize(
    ("response", "prompt"), [("<think>42", "q"), ("42", "q <think>\n"), ("a</think><think>42", "q")]
)
def test_thoughts_without_end_answer_nothing(response: str, prompt: str) -> None:
    assert answer_span(response, prompt) is None
