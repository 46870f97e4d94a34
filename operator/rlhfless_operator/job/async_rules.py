"""Rules over `async` and other fields of a job."""

from rlhfless_operator.job.rule import CelRule, Rule
from rlhfless_operator.job.sections import JobFields


def _actors_share_no_prefixes(spec: JobFields) -> str | None:
    if spec.asynchronous is not None and spec.generation.share_prefixes == "always":
        return (
            "with async each actor joins groups at times of its own, and would wait for a prefix of another one; write"
            " auto or never, or remove async"
        )
    return None


def _switching_is_possible(spec: JobFields) -> str | None:
    if spec.asynchronous is None or spec.asynchronous.new_weights != "switch":
        return None
    kl = spec.algorithm.resolved().kl
    if kl is not None and kl.coefficient > 0 and kl.placement == "reward":
        return (
            "with switch several versions of the weights sample a response, but a KL penalty in the reward is measured"
            " for one version; write finish, or algorithm.kl.placement: loss"
        )
    return None


def _keys_can_be_kept(spec: JobFields) -> str | None:
    if spec.asynchronous is None or spec.asynchronous.kv_cache != "keep":
        return None
    if spec.asynchronous.new_weights != "switch":
        return (
            f"with newWeights: {spec.asynchronous.new_weights} no response goes on with newer weights, and nothing can"
            " be kept; write newWeights: switch, or kvCache: recompute"
        )
    if spec.generation.engine == "vllm" and spec.model.lora is not None:
        return (
            "with model.lora vLLM never finds keys and values of the adapter before; write recompute, or"
            " generation.engine: transformers"
        )
    return None


def _stale_samples_are_corrected(spec: JobFields) -> str | None:
    algorithm = spec.algorithm
    correction = algorithm.importance_sampling
    if spec.asynchronous is None or algorithm.proximal_policy == "sampler":
        return None
    if correction.mode == "none" and correction.rejection is None:
        return (
            "without a correction, async would treat samples of older weights as samples of the newest; write"
            " truncate or mask, or set algorithm.proximalPolicy: sampler"
        )
    return None


ASYNC_RULES = (
    Rule(
        "async.newWeights",
        ("async", "algorithm"),
        _switching_is_possible,
        CelRule(
            "!has(self.async) || self.async.newWeights != 'switch' || !has(self.algorithm.kl) ||"
            " self.algorithm.kl.coefficient == 0.0 || self.algorithm.kl.placement != 'reward'",
            "async.newWeights: switch can't be combined with algorithm.kl.placement: reward",
        ),
    ),
    Rule(
        "async.kvCache",
        ("async", "generation.engine", "model.lora"),
        _keys_can_be_kept,
        CelRule(
            "!has(self.async) || self.async.kvCache != 'keep' || self.async.newWeights == 'switch' &&"
            " (self.generation.engine != 'vllm' || !has(self.model.lora))",
            "async.kvCache: keep needs newWeights: switch, and can't be combined with generation.engine: vllm and"
            " model.lora",
        ),
    ),
    Rule(
        "generation.sharePrefixes",
        ("async", "generation.sharePrefixes"),
        _actors_share_no_prefixes,
        CelRule(
            "!has(self.async) || self.generation.sharePrefixes != 'always'",
            "generation.sharePrefixes: always can't be combined with async",
        ),
    ),
    Rule(
        "algorithm.importanceSampling.mode",
        ("async", "algorithm"),
        _stale_samples_are_corrected,
        CelRule(
            "!has(self.async) || self.algorithm.proximalPolicy == 'sampler' ||"
            " self.algorithm.importanceSampling.mode != 'none' || has(self.algorithm.importanceSampling.rejection)",
            "async needs a correction for stale samples: algorithm.importanceSampling, or proximalPolicy: sampler",
        ),
    ),
)
