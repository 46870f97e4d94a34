"""Which beginnings of prompts a step's actors share, from the tree that preparation makes of the data."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.api import SampleTask, SharedPrefix
from rlhfless_functions.data.prefix_tree import PrefixTree, prefix_tree
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing, TokenSeconds
from tests.planner.prompt_blocks import name_blocks

BLOCK = 4


def sharing(
    prompts: Sequence[Sequence[int]], shares: Sequence[Sequence[int]], transfer: float = 0.1
) -> dict[str, dict[int, SharedPrefix]]:
    """What each actor's request would say, by prompt."""
    tree = prefix_tree(prompts, BLOCK)
    assert tree is not None
    tasks = [[SampleTask(prompt=row, index=0) for row in rows] for rows in shares]
    made = PrefixSharing(tree, tasks, [len(prompt) for prompt in prompts], TokenSeconds(1.0, transfer, transfer))
    return {
        name: {each.prompt: each for each in (told.prefixes if told else [])}
        for number, samples in enumerate(tasks)
        for name in [f"actor-{number:04d}"]
        for told in [made.of(name, samples, "folder")]
    }


def chain(tree: PrefixTree, row: int) -> list[int]:
    nodes, node = [], tree["nodes"][row]
    while node >= 0:
        nodes.insert(0, node)
        node = tree["parents"][node]
    return nodes


@given(st.lists(st.lists(st.integers(0, 1), max_size=20), min_size=1, max_size=8), st.integers(1, 4))
def test_the_tree_has_the_blocks_that_at_least_two_prompts_have(prompts: list[list[int]], block: int) -> None:
    named = [name_blocks(prompt, block).blocks for prompt in prompts]
    common = [
        [name for name in names if sum(name in others for others in named) > 1] for names in named
    ]  # names stand for whole prefixes
    tree = prefix_tree(prompts, block)
    if tree is None:
        assert not any(common)
        return
    chains = [chain(tree, row) for row in range(len(prompts))]
    assert list(map(len, chains)) == list(map(len, common))
    pairs = {pair for row in zip(common, chains, strict=True) for pair in zip(*row, strict=True)}
    assert len(pairs) == len({name for name, _ in pairs}) == len({node for _, node in pairs})


def test_each_prefix_has_one_source_and_all_others_read_it() -> None:
    prefixes = [list(range(20 * number, 20 * number + 20)) for number in range(3)]
    prompts = [[*prefix, 99, 100 + actor] for actor in range(3) for prefix in prefixes]
    told = sharing(prompts, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    for prefix in range(3):
        rows = [prefix, 3 + prefix, 6 + prefix]
        found = [told[f"actor-{number:04d}"][row] for number, row in enumerate(rows)]
        assert [each.tokens for each in found] == [20] * 3
        assert sum(each.source for each in found) == 1
    assert [sum(each.source for each in of.values()) for of in told.values()] == [1, 1, 1]


def test_prefixes_after_a_system_prompt_have_several_sources_too() -> None:
    system = list(range(200, 208))
    prompts = [[*system, *range(20 * number, 20 * number + 20), 99, actor] for actor in range(2) for number in range(2)]
    told = sharing(prompts, [[0, 1], [2, 3]])
    assert [sum(each.source for each in of.values()) for of in told.values()] == [1, 1]
    assert {each.tokens for of in told.values() for each in of.values()} == {28}


def test_a_prompt_that_was_moved_is_read_where_it_goes() -> None:
    prompts = [[*range(20), 50], [*range(20), 51]]
    tree = prefix_tree(prompts, BLOCK)
    assert tree is not None
    first, second = ([SampleTask(prompt=row, index=0)] for row in range(2))
    made = PrefixSharing(tree, [first, second], [21, 21], TokenSeconds(1.0, 0.1, 0.2))
    told = made.of("actor-0007", [*first, *second], "folder")
    assert told is not None
    assert (told.folder, told.prefixes) == (
        "folder", [SharedPrefix(prompt=row, tokens=20, source=False) for row in range(2)],
    )  # fmt: skip
    assert told.wait_seconds == 5 + 2 * 21 * 1.3, "twice what the busiest has to compute, send and fetch"


def test_nothing_is_shared_where_sending_takes_longer_or_nobody_else_needs_it() -> None:
    prompts = [[*range(20), 50], [*range(20), 51], [*range(100, 121)]]
    assert sharing(prompts, [[0], [1, 2]], transfer=2.0) == {"actor-0000": {}, "actor-0001": {}}
    assert sharing(prompts, [[0, 1], [2]]) == {"actor-0000": {}, "actor-0001": {}}
    tree = prefix_tree(prompts, BLOCK)
    assert tree is not None
    shares = [[SampleTask(prompt=row, index=0)] for row in range(2)]
    slow = TokenSeconds(1.0, 2.0, 2.0)
    always = PrefixSharing(tree, shares, [21] * 3, slow, 100.0, always=True)
    assert always.gain_seconds < 0
    assert [each is not None for each in (always.of(f"actor-{k:04d}", shares[k], "folder") for k in range(2))] == [
        True, True,
    ]  # fmt: skip
    assert prefix_tree([[1, 2, 3, 4], [1, 2, 3, 4]], BLOCK) is None, "the last token is in no block"


@given(st.integers(0, 1000))
def test_whatever_is_waited_for_has_a_source(seed: int) -> None:
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randrange(1, 40))] for _ in range(12)]
    if prefix_tree(prompts, BLOCK) is None:
        return
    shares: list[list[int]] = [[], [], []]
    for row in range(12):
        shares[draw.randrange(3)].append(row)
    told = [(row, each) for of in sharing(prompts, shares, draw.random()).values() for row, each in of.items()]
    begun = {(tuple(prompts[row][: each.tokens]), each.source) for row, each in told}
    assert {tokens for tokens, source in begun if not source} <= {tokens for tokens, source in begun if source}
    assert all(each.tokens < len(prompts[row]) for row, each in told)
