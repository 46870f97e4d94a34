"""What instances live in: failing nodes, spot capacity, cold starts, weights on a network, shared prefixes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClusterConditions:
    """Every option is off by default, and can be had by itself. Numbers without a source are for sweeps."""

    node_instances: int = 0
    """Instances that a node has room for; 0 knows no nodes. Those that end together share one."""
    node_failures_per_hour: float = 0.0
    """Of each node: all of its instances are lost at once, with what they had not flushed."""
    spot_share: float = 0.0
    """Part of the generation instances that run on spot capacity. What is held all the time and the learner do not."""
    spot_price: float = 0.35
    """Price of spot capacity over that of other capacity."""
    reclaims_per_hour: float = 0.0
    """Of each spot instance. It works until its successor is ready or the notice over, and publishes what it has."""
    notice_seconds: float = 120.0
    """From the notice of a reclaim to its end (AWS: 120 s, others 30 s)."""
    cold_share: float = 0.0
    """Part of the starts that find nothing asleep and load from nothing."""
    cold_seconds: float = 60.0
    """Such a start (published: 30 to 135 s)."""
    weights: Literal["constant", "store", "relay"] = "constant"
    """How new weights reach instances: in the scenario's time; from a store whose bandwidth they share; or from one
    another in a chain, block by block."""
    store_gigabytes_per_second: float = 10.0
    """Of the store, over all instances."""
    link_gigabytes_per_second: float = 4.0
    """Of an instance."""
    relay_blocks: int = 32
    """Blocks that the weights are cut into; an instance sends one on while it receives the next."""
    shared_prefix_tokens: int = 0
    """Tokens that all prompts begin with, besides their own: a system prompt, worked examples."""
    prefixes: Literal["computed", "cached", "shipped"] = "cached"
    """A shared prefix is computed for each prompt; once an instance; or once, and sent to the others where that is
    faster."""

    def __post_init__(self) -> None:
        for name in ("spot_share", "cold_share", "spot_price"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: a share is between 0 and 1")
        positive = ("store_gigabytes_per_second", "link_gigabytes_per_second", "relay_blocks")
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it is more than 0")
        for name in (
            "node_instances", "node_failures_per_hour", "reclaims_per_hour", "notice_seconds", "cold_seconds",
            "shared_prefix_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it is 0 or more")
        if self.node_failures_per_hour and not self.node_instances:
            raise ValueError("node_instances is 0 where nodes fail: give how many instances a node has room for")

    def weight_load_seconds(self, constant: float, gigabytes: float, instances: int) -> float:
        """How long it takes until the last of some instances has new weights.

        Args:
            constant: the scenario's own figure.
            gigabytes: of the weights.
            instances: that load at a time.
        """
        alone = gigabytes / self.link_gigabytes_per_second
        if self.weights == "store":
            return max(alone, instances * gigabytes / self.store_gigabytes_per_second)
        if self.weights == "relay":
            return alone * (1 + (instances - 1) / self.relay_blocks)
        return constant

    def prefix_seconds(self, token_seconds: float, gigabytes_per_token: float, *, first: bool) -> float:
        """What it takes an instance to have the shared prefix.

        Args:
            token_seconds: of prefill.
            gigabytes_per_token: of keys and values.
            first: whether no other instance has it yet.
        """
        computed = token_seconds * self.shared_prefix_tokens
        if self.prefixes != "shipped" or first:
            return computed
        return min(computed, self.shared_prefix_tokens * gigabytes_per_token / self.link_gigabytes_per_second)
