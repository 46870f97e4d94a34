"""All metrics of `metrics.jsonl`: those of the functions, and those that the control plane adds."""

from collections.abc import Collection

from rlhfless_functions.api.metrics import LEARNING_METRICS, PREPARATION_METRICS, Metric

DRIVER_METRICS: dict[str, Metric] = {
    "dynamic_sampling/rounds": Metric("number", "Sampling rounds of the step, including the first."),
    "dynamic_sampling/replaced_groups": Metric("groups", "Groups with nothing to learn from, which were replaced."),
    "dynamic_sampling/epoch": Metric("number", "Passes over the data so far, with the prompts of replaced groups."),
    "generation/seconds": Metric("seconds", "Time from the step's beginning to its last sample."),
    "generation/staleness": Metric(
        "versions",
        "With `async`: versions between the weights that sampled the step's groups and those that it started from, mean"
        " over the groups. With `newWeights: switch`, the oldest token of a group counts.",
    ),
    "generation/waits": Metric(
        "number",
        "With `async`: 1 if enough groups were complete, and the learner waited for one that would have become too"
        " stale (`tooStale: wait`); else 0.",
    ),
    "generation/dropped_groups": Metric(
        "groups", "With `tooStale: drop`: dropped groups whose generation anew began since the previous step."
    ),
    "generation/downweighted_groups": Metric(
        "groups", "With `tooStale: downweight`: groups whose advantages the step multiplied by less than 1."
    ),
    "mismatch/explained": Metric(
        "number",
        "Largest `mismatch/mean_exp_abs` that the job's number formats explain; above it there is a warning"
        " (`limits.mismatch`).",
    ),
    "generation/token_staleness": Metric(
        "versions",
        "With `newWeights: switch`: versions between the weights that sampled a token and those that the step started"
        " from, mean over the response tokens.",
    ),
    "generation/switched_responses": Metric(
        "share", "With `newWeights: switch`: share of responses with tokens of several weights versions."
    ),
    "generation/switches": Metric(
        "requests", "With `newWeights: switch`: requests cut to continue their samples with newer weights."
    ),
    "generation/kept_responses": Metric(
        "samples",
        "With `kvCache: keep`: times that a response went on with the keys and values that its instance had, mostly of"
        " older weights.",
    ),
    "generation/kept_tokens": Metric(
        "tokens",
        "With `kvCache: keep`: tokens of these responses and their prompts that were not computed anew. A prompt that"
        " several of them have counts once in each request.",
    ),
    "generation/lost_instances": Metric("instances", "Instances lost during generation."),
    "generation/cuts": Metric("requests", "Cut requests, whose samples continued on other actors."),
    "generation/moved_samples": Metric("samples", "Samples that the driver chose to move to another actor."),
    "generation/let_go": Metric(
        "share", "Share of the actors' time without an instance, because all of their samples waited for environments."
    ),
    "generation/passes": Metric("number", "Decode passes over all instances, if transformers generates."),
    "generation/tokens_per_pass": Metric(
        "tokens", "Tokens of a sequence per decode pass, mean, if transformers generates; 1 without drafts."
    ),
    "generation/engine_factor": Metric(
        "number",
        "How many times as long as by the table of its GPU the engine takes, median of the newest requests. Tables have"
        " the kernels alone; an engine schedules and samples besides. `rlhfless plan --trace` counts it.",
    ),
    "generation/drafts/tried": Metric("tokens", "Drafted tokens that were verified in passes."),
    "generation/drafts/accepted": Metric("tokens", "Verified drafted tokens that would have been sampled anyway."),
    "generation/drafts/coverage": Metric(
        "share",
        "Share of a sequence's passes with a lookup of drafts that had something to draft.",
    ),
    "generation/drafts/acceptance": Metric(
        "share", "Probability that a drafted token was right if all before it in its draft were. Plans use it."
    ),
    "generation/drafts/seconds": Metric("seconds", "Time to look up drafts, over all instances."),
    "generation/drafts/unreadable": Metric("number", "Times that responses of an earlier step could not be read."),
    "generation/prefixes/tokens_sent": Metric("tokens", "Tokens of shared prefixes whose keys and values were sent."),
    "generation/prefixes/tokens_fetched": Metric(
        "tokens", "Tokens of shared prefixes whose keys and values were fetched."
    ),
    "generation/prefixes/bytes_sent": Metric("bytes", "Size of sent keys and values."),
    "generation/prefixes/bytes_fetched": Metric("bytes", "Size of fetched keys and values."),
    "generation/prefixes/seconds_sent": Metric("seconds", "Time to send keys and values, over all instances."),
    "generation/prefixes/seconds_fetched": Metric("seconds", "Time to fetch keys and values, over all instances."),
    "generation/prefixes/seconds_waited": Metric(
        "seconds", "Time in which instances waited for keys and values with nothing else to do."
    ),
    "weights/bytes_same_node": Metric(
        "bytes",
        "On a cluster: new weights that generation instances on the learner's node have read since the previous step"
        " was learnt. Each instance counts a version once.",
    ),
    "weights/bytes_same_zone": Metric(
        "bytes", "The same for other nodes of its zone, or of another domain of `placement.topologyKeys`."
    ),
    "weights/bytes_across_zones": Metric("bytes", "The same for instances in other zones."),
    "weights/bytes_other_node": Metric("bytes", "The same for instances on other nodes, if zones are unknown."),
    "weights/bytes_fetched": Metric(
        "bytes", "Bytes that generation instances fetched from an object store for the step's weights."
    ),
    "weights/bytes_relayed": Metric(
        "bytes", "Bytes that generation instances fetched from each other for the step's weights."
    ),
    "weights/relays_refused": Metric(
        "instances", "Instances that did not send weights, or sent damaged ones. The next source was read instead."
    ),
    "weights/prefetched": Metric(
        "requests", "Requests whose new weights were in the instance's memory when they asked for them."
    ),
    "weights/deltas": Metric("number", "Files that generation instances made of the previous version and its changes."),
    "weights/deltas_refused": Metric(
        "number", "Files that were fetched whole because their changes were missing or damaged."
    ),
    "weights/seconds": Metric("seconds", "Time until the last actor of the step had its weights."),
    "preparation/instances": Metric("instances", "Most instances that prepared the step's groups at a time."),
    "learning/beyond_preparation": Metric(
        "seconds", "Time from the last prepared group to the new weights, for a learner that followed preparation."
    ),
    "learning/instances": Metric("instances", "Instances that took the step together."),
    "learning/instances_chosen": Metric(
        "instances", "Instances that the plan wanted, if `learning.instances` left it a choice."
    ),
    "planning/expected_seconds": Metric("seconds", "Duration of generation that the plan expected."),
    "planning/expected_step_seconds": Metric(
        "seconds", "Duration of the step, until the new weights, that the plan expected."
    ),
    "planning/contention": Metric(
        "share", "Share of the pool's GPU time that other jobs wanted when the step was planned."
    ),
    "planning/lower_bound_instance_seconds": Metric(
        "instance-seconds",
        "Lowest possible cost of the step's generation if all lengths were known beforehand and all drafts were right.",
    ),
    "planning/lower_bound_share": Metric(
        "share",
        "The lower bound divided by the actual cost of generation. Missing with `async`, which generates for other"
        " steps at the same time.",
    ),
    "prediction/seen_share": Metric("share", "Share of prompts that had been visited before."),
    "prediction/rank_correlation": Metric("number", "Spearman's ρ of predicted and actual lengths of all samples."),
    "prediction/prompt_rank_correlation": Metric(
        "number", "Spearman's ρ of predicted and actual lengths, over the prompts' means."
    ),
    "prediction/relative_error": Metric(
        "number", "Absolute error of the predicted lengths divided by the actual ones, mean over the samples."
    ),
    "prediction/bias": Metric("number", "Sum of predicted / sum of actual lengths, minus 1; positive means too long."),
}
"""Metrics of the control plane: the course of generation, and the quality of its plan."""

STEP_METRICS = {**PREPARATION_METRICS, **DRIVER_METRICS, **LEARNING_METRICS}
"""Possible metrics of a step. If preparation and learning both measure one, learning's value counts."""

EVALUATION_METRICS = {
    **PREPARATION_METRICS,
    "reward": Metric("reward", "Held-out reward: the mean on the evaluation's prompts, by the evaluation's rewards."),
}
"""Possible metrics of a step's `evaluation`."""


def metric_named(
    name: str, catalogue: dict[str, Metric], rewards: Collection[str], logged: Collection[str] = ()
) -> Metric | None:
    """Return the meaning of a name in `metrics.jsonl`; None if it is not in the catalogue.

    Args:
        catalogue: the metrics to search.
        rewards: names of the job's rewards.
        logged: names that their functions log.
    """
    found = catalogue.get(name)
    if found is not None or not name.startswith("reward/"):
        return found
    reward, _, rest = name.removeprefix("reward/").partition("/")
    if reward not in rewards:
        return None
    pattern = "/".join(["reward/<reward>", *([rest] if rest else [])])
    return catalogue.get("reward/<reward>/<logged>" if rest in logged else pattern)
