"""The reward's function in a file, if a job names none: whose name need not be `reward`."""

import ast

import pytest

from rlhfless_functions.rewards.signatures import usual_function

VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n"
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...\n"
OPENRLHF = "def reward_func(queries, prompts, labels, **kwargs): ...\n"
TRL = "def accuracy(prompts, completions, **columns): ...\n"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (VERL, "compute_score"),
        (BATCH, "compute_score"),
        (OPENRLHF, "reward_func"),
        (TRL, "accuracy"),
        ("async " + VERL, "compute_score"),
        (VERL.replace("compute_score", "mine"), "mine"),
        ("def mine(*, solution_str, **given): ...\n", "mine"),
        ("@cached\ndef mine(completions): ...\n", "mine"),
        ("def extract_solution(solution_str, method='strict'): ...\n" + VERL, "compute_score"),
        ("def _clean(completions): ...\nclass Judge: ...\ndef norm(text): ...\n" + TRL, "accuracy"),
        (TRL + "def reward(completions): ...\n", "reward"),
        (VERL + "def reward(completions): ...\n", "reward"),
        ("def is_right(solution_str, ground_truth): ...\n" + VERL, "compute_score"),
        (TRL + OPENRLHF, "reward_func"),
    ],
)
def test_the_only_function_with_the_signature_of_a_reward_is_it(code: str, name: str) -> None:
    assert usual_function(ast.parse(code).body) == name


@pytest.mark.parametrize(
    "code", [VERL + OPENRLHF, TRL + TRL.replace("accuracy", "brevity"), "def score(text): ...\n", "x = 1\n", ""]
)
def test_where_several_or_none_may_be_it_nothing_is_guessed(code: str) -> None:
    assert usual_function(ast.parse(code).body) == "reward"
