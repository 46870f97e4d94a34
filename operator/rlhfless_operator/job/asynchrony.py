"""Generating ahead of the learner."""

from typing import Annotated, Literal

from pydantic import Field

from rlhfless_functions.settings import EXPERIMENTAL, Settings


class AsyncSpec(Settings):
    """Generate the groups of the next steps while the learner takes this one, with weights that are some versions old.
    Generation and learning need GPUs of their own: a pool whose pods use GPUs in turns is refused."""

    max_staleness: int = Field(default=1, ge=1, le=8)
    """Most versions between the weights that sampled a group and those that the step which learns from it starts from.
    Generation waits until the learner is near enough, and `tooStale` says what happens where a group takes longer than
    that allows. Generation goes no further ahead than keeps the learner from waiting."""
    new_weights: Annotated[Literal["finish", "switch"], EXPERIMENTAL] = "finish"
    """What happens to a response when newer weights are published. `finish` completes it, and all groups of its
    rollout, with the weights that began it. `switch` goes on with the newer weights from the next token on; each token
    keeps the log-probability under the weights that sampled it. `maxStaleness` then bounds the oldest token of a group.
    `switch` is experimental: nothing has been measured on GPUs."""
    kv_cache: Annotated[Literal["recompute", "keep"], EXPERIMENTAL] = "recompute"
    """Keys and values of a response that goes on with newer weights. `recompute` computes them anew, and each token has
    the probabilities of one version. `keep` goes on at once with those of the older weights, on the instance that has
    them; a token then has probabilities of no single version, and the losses correct for it as for stale weights. It
    needs `newWeights: switch`. `keep` is experimental: nothing has been measured on GPUs."""
    too_stale: Annotated[Literal["wait", "drop", "downweight"], EXPERIMENTAL] = "wait"
    """What happens where a group takes so long that it would exceed `maxStaleness`. With `wait` the learner
    waits for it before it takes a step that would leave it too stale. With `drop` the learner goes on. The group is
    dropped, and its prompt is generated anew with newer weights. With `downweight` the learner goes on, and learns from
    the group later, with its advantages multiplied by (1 + `maxStaleness`) / (1 + its staleness). With
    `algorithm.dynamicSamplingRounds` groups keep to their step, and none exceeds `maxStaleness`. `drop` and
    `downweight` are experimental: neither has shown a gain over `wait`."""
