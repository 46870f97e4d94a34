"""Chains in which instances pass weights on: their order, and when the last one has a version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.relays import chain, chain_seconds, store_seconds

rates = st.floats(1e3, 1e12)
sizes = st.floats(1.0, 1e13)
names = st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=12)


@given(names, st.data())
def test_each_instance_is_in_the_chain_once_and_slow_links_come_last(instances: list[str], data: st.DataObject) -> None:
    links = data.draw(st.dictionaries(st.sampled_from(instances), rates)) if instances else {}
    ordered = chain(instances, links)
    assert sorted(ordered) == sorted(instances)
    speeds = [links.get(instance, 0.0) for instance in ordered]
    assert speeds == sorted(speeds, reverse=True)
    unknown = [instance for instance in instances if instance not in links]
    assert [instance for instance in ordered if instance not in links] == unknown


@given(sizes, rates, st.lists(rates, max_size=20), sizes)
def test_no_chain_is_faster_than_its_slowest_link_nor_slower_than_passing_on_whole_versions(
    size: float, store: float, links: list[float], chunk: float
) -> None:
    seconds = chain_seconds(size, store, links, chunk)
    assert size / min(store, *links, float("inf")) <= seconds * (1 + 1e-9)
    assert seconds <= sum(size / link for link in (store, *links)) * (1 + 1e-9)


@given(sizes, rates, st.integers(1, 64), st.floats(1e-6, 1.0))
def test_with_equal_links_the_last_instance_waits_for_one_version_and_a_chunk_of_each_instance(
    size: float, rate: float, instances: int, share: float
) -> None:
    seconds = chain_seconds(size, rate, [rate] * (instances - 1), share * size)
    assert seconds == pytest.approx((1 + (instances - 1) * share) * size / rate)
    assert seconds <= store_seconds(size, rate, instances) * (1 + 1e-9)
