"""How many devices of a DeviceClass the ResourceSlices of a cluster offer."""

from typing import Any

import pytest

from rlhfless_operator.preflight.devices import Offer, offer_of

DRIVER = "gpu.nvidia.com"
# As NVIDIA's driver makes it.
NVIDIA = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"


def device_class(*expressions: str) -> dict[str, Any]:
    return {"spec": {"selectors": [{"cel": {"expression": expression}} for expression in expressions]}}


def resource_slice(node: str | None, *devices: dict[str, Any], driver: str = DRIVER, **pool: Any) -> dict[str, Any]:
    place: dict[str, Any] = {"allNodes": True} if node is None else {"nodeName": node}
    named = {"name": node or "fabric", "generation": 1, "resourceSliceCount": 1, **pool}
    return {"spec": {"driver": driver, "pool": named, "devices": list(devices), **place}}


def gpu(kind: str = "gpu", **rest: Any) -> dict[str, Any]:
    return {"name": "gpu-0", "attributes": {"type": {"string": kind}}, **rest}


def test_the_drivers_devices_are_counted_by_node() -> None:
    slices = [
        resource_slice("a", gpu(), gpu()),
        resource_slice("a", gpu(), driver="nic.test"),
        resource_slice("b", gpu()),
    ]
    offer = offer_of(device_class(f"device.driver == '{DRIVER}'"), slices)
    assert offer == Offer({"a": 2, "b": 1}, exact=True)
    assert (offer.total, offer.largest) == (3, 2)


def test_a_class_without_selectors_picks_everything() -> None:
    slices = [resource_slice("a", gpu()), resource_slice("a", gpu(), driver="nic.test")]
    assert offer_of(device_class(), slices) == Offer({"a": 2}, exact=True)
    assert offer_of({}, slices).total == 2


@pytest.mark.parametrize(
    ("attributes", "picked"),
    [
        ({"type": {"string": "gpu"}}, 1),
        ({f"{DRIVER}/type": {"string": "gpu"}}, 1),
        ({"type": {"string": "mig"}}, 0),
        ({"nic.test/type": {"string": "gpu"}}, 0),
        ({}, 0),
    ],
)
def test_an_attribute_is_compared(attributes: dict[str, Any], picked: int) -> None:
    offer = offer_of(device_class(NVIDIA), [resource_slice("a", {"name": "gpu-0", "attributes": attributes})])
    assert (offer.total, offer.exact) == (picked, True)


@pytest.mark.parametrize(
    ("expression", "picked"),
    [
        (f"device.driver == '{DRIVER}' && device.capacity['{DRIVER}'].memory.compareTo(quantity('40Gi')) >= 0", 1),
        (f'device.driver == "{DRIVER}" && (device.x == "a" || device.x == "b")', 1),
        (f"device.driver == '{DRIVER}' || device.driver == 'nic.test'", 2),
        (f"device.x == 'a' || device.x == 'b' && device.driver == '{DRIVER}'", 2),
        (f"device.driver != '{DRIVER}'", 2),
        (f"device.driver == '{DRIVER}' ? true : device.x == 'a'", 2),
        (f"!(device.driver == '{DRIVER}' && device.x == 'a')", 2),
    ],
)
def test_of_a_selector_that_says_more_the_count_is_an_upper_bound(expression: str, picked: int) -> None:
    slices = [resource_slice("a", gpu()), resource_slice("a", gpu(), driver="nic.test")]
    offer = offer_of(device_class(expression), slices)
    assert (offer.total, offer.exact) == (picked, False)


def test_every_selector_has_to_hold() -> None:
    slices = [resource_slice("a", gpu()), resource_slice("b", gpu("mig"))]
    both = device_class(f"device.driver == '{DRIVER}'", f"device.attributes['{DRIVER}'].type == 'mig'")
    assert offer_of(both, slices) == Offer({"b": 1}, exact=True)


def test_an_earlier_generation_of_a_pool_does_not_count() -> None:
    slices = [resource_slice("a", gpu(), gpu(), generation=1), resource_slice("a", gpu(), generation=2)]
    assert offer_of(device_class(), slices).total == 1


def test_a_tainted_device_does_not_count() -> None:
    slices = [resource_slice("a", gpu(), gpu(taints=[{"key": "broken", "effect": "NoSchedule"}]))]
    assert offer_of(device_class(), slices).total == 1


def test_partitions_of_a_device_are_an_upper_bound() -> None:
    slices = [resource_slice("a", gpu(consumesCounters=[{"counterSet": "gpu-0"}]))]
    assert offer_of(device_class(), slices) == Offer({"a": 1}, exact=False)


def test_devices_of_no_node_have_a_place_of_their_own() -> None:
    assert offer_of(device_class(), [resource_slice(None, gpu())]).by_place == {f"pool fabric of {DRIVER}": 1}


def test_groups_are_allocated_on_one_node() -> None:
    offer = Offer({"a": 6, "b": 6, "c": 3}, exact=True)
    assert [offer.in_groups_of(together) for together in (1, 3, 4, 8)] == [15, 15, 8, 0]
