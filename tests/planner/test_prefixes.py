"""Prefixes: what is shared, what is computed, and what is worth sending."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.prefixes import Fetch, expected_gain, plan_prefixes, prefill_tokens
from tests.planner.prompt_blocks import name_blocks

token_lists = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=6)


def trie_nodes(prompts, block):
    """Tokens by walking a real trie of blocks."""
    root, tokens = {}, 0
    for prompt in prompts:
        at, whole = root, max(0, (len(prompt) - 1) // block)
        for k in range(whole):
            piece = tuple(prompt[k * block : (k + 1) * block])
            if piece not in at:
                at[piece] = {}
                tokens += block
            at = at[piece]
        tokens += len(prompt) - whole * block
    return tokens


def plan_for(actors, prefill=1.0, transfer=0.1, fixed=0.0, split=False):
    return plan_prefixes(
        {name: [name_blocks(each, 2) for each in prompts] for name, prompts in actors.items()},
        block_tokens=2, prefill_token_seconds=prefill, transfer_token_seconds=transfer, transfer_seconds=fixed,
        split=split,
    )  # fmt: skip


@given(token_lists, st.integers(1, 4))
def test_tokens_to_prefill_are_the_nodes_of_the_trie(prompts, block):
    assert prefill_tokens([name_blocks(prompt, block) for prompt in prompts], block) == trie_nodes(prompts, block)


def test_more_actors_never_mean_fewer_tokens():
    """The paper's search assumes the contrary; prompts aX and aY refute it."""
    together = prefill_tokens([name_blocks([1, 1, 2, 2, 3], 2), name_blocks([1, 1, 4, 4, 5], 2)], 2)
    apart = sum(prefill_tokens([name_blocks(prompt, 2)], 2) for prompt in ([1, 1, 2, 2, 3], [1, 1, 4, 4, 5]))
    assert (together, apart) == (8, 10)


def test_the_last_token_is_always_computed():
    assert name_blocks([1, 2, 3, 4], 2).rest == 2
    assert name_blocks([], 2).rest == 0


def test_a_long_shared_prefix_is_sent():
    plan = plan_for({"a": [[*range(10), 77], [*range(10), 78]], "b": [[*range(10), 99]]})
    (fetch,) = plan.fetches["b"]
    assert (fetch.source, fetch.tokens) == ("a", 10)
    assert plan.prefill_tokens == {"a": 12, "b": 1}
    assert plan.saved_seconds == pytest.approx(10 * (1.0 - 0.1))


def test_actors_that_need_the_same_prefixes_compute_as_much_as_each_other():
    prompts = [[*range(20 * k, 20 * k + 20), 99] for k in range(4)]
    plan = plan_for(dict.fromkeys("abcd", prompts))
    assert set(plan.prefill_tokens.values()) == {20 + 4}
    assert {name: len(fetches) for name, fetches in plan.fetches.items()} == dict.fromkeys("abcd", 3)


def test_nothing_is_sent_where_computing_is_quicker():
    actors = {"a": [[*range(10), 77]], "b": [[*range(10), 99]]}
    assert plan_for(actors, transfer=2.0).fetches == {}
    assert plan_for(actors, fixed=10.0).fetches == {}


def test_prefixes_that_go_on_from_a_system_prompt_are_divided_once_each_actor_computes_that_itself():
    prompts = [[*range(200, 210), *range(20 * k, 20 * k + 20), 99] for k in range(4)]
    actors = dict.fromkeys("abcd", prompts)
    together, split = plan_for(actors), plan_for(actors, split=True)
    assert set(split.prefill_tokens.values()) == {10 + 20 + 4}
    assert {fetch.tokens for fetches in split.fetches.values() for fetch in fetches} == {30}
    assert gain_of(together) < 0 < gain_of(split), "one actor would compute everything, and the others wait for it"
    alone = [[*range(200, 210), 99]]
    assert plan_for(dict.fromkeys("ab", alone), split=True) == plan_for(dict.fromkeys("ab", alone))


@given(st.lists(token_lists, min_size=1, max_size=4), st.floats(0, 2), st.floats(0, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_actor_gets_or_computes_all_that_it_needs(shares, transfer, fixed, split):
    actors = {f"actor-{k}": prompts for k, prompts in enumerate(shares)}
    plan = plan_for(actors, transfer=transfer, fixed=fixed, split=split)
    assert plan.saved_seconds >= 0
    for name, prompts in actors.items():
        alone = trie_nodes(prompts, 2)
        got = sum(fetch.tokens for fetch in plan.fetches.get(name, ()))
        assert alone - got <= plan.prefill_tokens[name] <= alone
        assert all(isinstance(fetch, Fetch) and fetch.source != name for fetch in plan.fetches.get(name, ()))
    everything = trie_nodes(list(itertools.chain.from_iterable(shares)), 2)
    assert sum(plan.prefill_tokens.values()) >= everything


def gain_of(plan, *, send=0.1, transfer=0.1, fixed=0.0):
    return expected_gain(
        plan, prefill_token_seconds=1.0, send_token_seconds=send, transfer_token_seconds=transfer,
        transfer_seconds=fixed,
    )  # fmt: skip


def test_actors_that_compute_a_prefix_each_and_fetch_the_others_gain():
    prompts = [[*range(20 * k, 20 * k + 20), 99] for k in range(4)]
    plan = plan_for(dict.fromkeys("abcd", prompts))
    # 84 tokens each become 24, then 20 are sent, and 60 fetched.
    assert gain_of(plan) == pytest.approx(4 * (84 - 24 - 20 * 0.1 - 60 * 0.1))


def test_nothing_is_gained_where_all_wait_for_one_prefix():
    """It is less work, but an instance that waits is held as long as if it computed."""
    plan = plan_for({name: [[*range(20), 99]] for name in "abcd"})
    assert plan.saved_seconds > 0
    assert gain_of(plan) == pytest.approx(-(4 * 20 * 0.1 + 3 * 20 * 0.1))
    assert gain_of(plan, send=0.0, transfer=0.0) == 0


@given(
    st.lists(token_lists, min_size=1, max_size=4),
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(0, 3),
    st.floats(0, 1),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_gain_is_at_most_the_work_that_is_saved_and_falls_with_what_sending_takes(
    shares, transfer, send, fixed, more, split
):
    plan = plan_for(
        {f"actor-{k}": prompts for k, prompts in enumerate(shares)}, transfer=transfer, fixed=fixed, split=split
    )
    gain = gain_of(plan, send=send, transfer=transfer, fixed=fixed)
    assert gain <= plan.saved_seconds + 1e-6
    slower = (
        gain_of(plan, send=send + more, transfer=transfer, fixed=fixed),
        gain_of(plan, send=send, transfer=transfer + more, fixed=fixed),
        gain_of(plan, send=send, transfer=transfer, fixed=fixed + more),
    )
    assert max(slower) <= gain + 1e-6
    if not plan.fetches:
        assert gain == 0
