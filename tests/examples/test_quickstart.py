"""The examples: the quickstart's task, reward, data and checkpoint, and every job document."""

import importlib
import json
import random
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless_operator.job.spec import RLHFJob

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(QUICKSTART))
    chains, make_assets, reward = map(importlib.import_module, ("chains", "make_assets", "reward"))

SEEDS = st.integers(0, 2**32)
EOS = reward.EOS_TOKEN_ID


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (QUICKSTART / name).read_text().splitlines()]


def score(text: str, truth: str, ended: bool = True) -> float:
    (value,) = reward.reward([text], [[20, EOS] if ended else [20, 21]], [truth])
    return value


# --- the task ----------------------------------------------------------------------------------------------------


@given(SEEDS)
def test_a_chain_stays_in_range_and_its_worked_response_earns_the_reward(seed: int) -> None:
    chain = chains.draw_chain(random.Random(seed))
    value = chain.start
    assert 1 <= len(chain.operands) <= chains.LONGEST_CHAIN
    for operand in chain.operands:
        value += operand
        assert 0 <= value <= 99 and 1 <= abs(operand) <= 9
    response = chains.worked_response(chain)
    assert score(response, str(value)) == score(chains.terse_response(chain), str(value)) == 1.0
    assert len(response) < make_assets.LONGEST_RESPONSE


@given(SEEDS)
def test_every_line_of_the_scratchpad_is_true(seed: int) -> None:
    chain = chains.draw_chain(random.Random(seed))
    *steps, result = chains.worked_response(chain).split(";")
    for step in steps:
        left, right = step.split("=")
        assert eval(left) == int(right)
    assert result == f"#{chain.result}"


@given(SEEDS)
def test_a_slip_is_corrected_or_carried_on_and_never_leaves_the_range(seed: int) -> None:
    generator = random.Random(seed)
    chain = chains.draw_chain(generator)
    response = chains.worked_response(chain, generator, slip=1.0)
    numbers = [int(part.split("?")[-1]) for part in response.replace("=", "?").split(";")[:-1]]
    assert all(0 <= number <= 99 for number in numbers)
    assert response.endswith(f"#{numbers[-1]}")


def test_the_same_seed_draws_the_same_chains_and_none_that_are_excluded() -> None:
    first = chains.draw_chains(random.Random(7), 50)
    assert chains.draw_chains(random.Random(7), 50) == first
    excluded = {chain.question for chain in first[:10]}
    others = chains.draw_chains(random.Random(7), 40, without=excluded)
    assert not excluded & {chain.question for chain in others}


# --- the reward --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("7+5=12;#12", True, 1.0),
        ("#12", True, 1.0),
        ("7+5=12;#12", False, 0.0),
        ("7+5=13;#13", True, 0.0),
        ("#12#12", True, 0.0),
        ("#1#2", True, 0.0),
        ("7+5=12", True, 0.0),
        ("#", True, 0.0),
        ("#-12", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_only_a_finished_response_with_one_right_result_is_rewarded(text: str, ended: bool, expected: float) -> None:
    assert score(text, "12", ended) == expected


@given(st.text(max_size=30), st.integers(0, 99), st.booleans())
def test_any_text_gets_zero_or_one(text: str, truth: int, ended: bool) -> None:
    assert score(text, str(truth), ended) in (0.0, 1.0)


def test_rewards_come_in_the_order_of_the_completions() -> None:
    assert reward.reward(["#1", "#2", "#3"], [[EOS], [EOS], []], ["1", "1", "3"], prompts=["", "", ""]) == [
        1.0,
        0.0,
        0.0,
    ]


# --- what is shipped ---------------------------------------------------------------------------------------------


def test_the_shipped_data_is_what_the_script_makes_and_its_halves_are_disjoint() -> None:
    training, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    assert (len(training), len(heldout)) == (256, 200)
    assert len({row["prompt"] for row in training + heldout}) == 456
    drawn = chains.draw_chains(random.Random(make_assets.SEED), 456)
    assert training + heldout == [{"prompt": chain.prompt, "ground_truth": str(chain.result)} for chain in drawn]


def test_everything_that_is_shipped_is_smaller_than_two_megabytes() -> None:
    files = [path for path in QUICKSTART.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 2_000_000


def test_the_tokenizer_has_one_token_a_character_and_comes_back_to_the_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    assert len(tokenizer) == 63
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.pad_token_id not in (None, EOS)
    for row in rows("train.jsonl"):
        tokens = tokenizer.encode(row["prompt"])
        assert len(tokens) == len(row["prompt"])
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == row["prompt"]


def test_the_checkpoint_loads_and_mostly_knows_the_task_when_it_is_greedy() -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == model.generation_config.eos_token_id == EOS
    assert model.config.vocab_size == len(tokenizer)
    assert make_assets.accuracy(model, tokenizer, rows("heldout.jsonl")[:20], samples=1, greedy=True) > 0.7


# --- the jobs ----------------------------------------------------------------------------------------------------


def load(path: Path) -> RLHFJob:
    return RLHFJob.model_validate(yaml.safe_load(path.read_text())).resolve_paths(path.parent)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/*.yaml")), ids=lambda path: "/".join(path.parts[-2:]))
def test_a_job_is_valid_and_every_path_in_it_exists(path: Path) -> None:
    spec = load(path).spec
    paths = [spec.model.source, spec.data.source]
    paths += [reward.python.file for reward in spec.rewards if reward.python]
    paths += [spec.evaluation.data.source] if spec.evaluation else []
    assert [path for path in paths if not Path(path).exists()] == []


@pytest.mark.parametrize("name", ["grpo.yaml", "ppo.yaml", "dapo.yaml"])
def test_the_quickstarts_limits_fit_its_data_and_its_model(name: str) -> None:
    spec = load(QUICKSTART / name).spec
    longest = max(len(row["prompt"]) for row in rows("train.jsonl") + rows("heldout.jsonl"))
    assert longest <= spec.sampling.max_prompt_tokens
    assert spec.sampling.max_response_tokens == make_assets.LONGEST_RESPONSE
    assert spec.sampling.max_prompt_tokens + spec.sampling.max_response_tokens <= 512
    assert (spec.generation.instances.min, spec.generation.instances.max) == (2, 2)
    assert spec.prices.instance_hour > 0


@pytest.mark.parametrize("name", ["ppo.yaml", "dapo.yaml"])
def test_grpo_and_the_others_differ_in_nothing_but_the_algorithm(name: str) -> None:
    grpo, other = (load(QUICKSTART / job).spec for job in ("grpo.yaml", name))
    assert other.model_copy(update={"algorithm": grpo.algorithm}) == grpo


def test_the_reward_of_ones_own_prefers_right_to_wrong_to_none() -> None:
    path = EXAMPLES / "own_data" / "my_reward.py"
    spec = spec_from_file_location("my_reward", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reward(["7+5=12;#12", "#13", "who knows"], answer=["12"] * 3) == [1.0, 0.1, 0.0]
