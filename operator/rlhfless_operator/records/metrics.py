"""Every metric of `metrics.jsonl`: those of the functions, and those that the control plane adds."""

from collections.abc import Collection

from rlhfless_functions.api.metrics import LEARNING_METRICS, PREPARATION_METRICS, Metric

DRIVER_METRICS: dict[str, Metric] = {
    "dynamic_sampling/rounds": Metric("number", "Rounds that the step sampled in, the first included."),
    "dynamic_sampling/replaced_groups": Metric("groups", "Groups that taught nothing and were replaced by others."),
    "generation/seconds": Metric("seconds", "From the step's beginning to its last sample."),
    "generation/staleness": Metric(
        "versions",
        "With `async`: between the weights that sampled the step's groups and those that it started from, mean over the"
        " groups.",
    ),
    "generation/lost_instances": Metric("instances", "Instances that were lost while they generated."),
    "generation/cuts": Metric("requests", "Requests that were cut; their samples went on elsewhere."),
    "generation/moved_samples": Metric("samples", "Samples that were moved to another actor by choice."),
    "generation/passes": Metric("number", "Decode passes, all instances together, where transformers generates."),
    "generation/tokens_per_pass": Metric(
        "tokens", "Tokens that a sequence got from a decode pass, mean: 1 without drafts, where transformers generates."
    ),
    "generation/drafts/tried": Metric("tokens", "Tokens that were drafted, and computed in passes to see."),
    "generation/drafts/accepted": Metric("tokens", "Those of them that would have been sampled anyway."),
    "generation/drafts/coverage": Metric(
        "share",
        "Of a sequence's passes before which drafts were looked for: those for which there was something to draft.",
    ),
    "generation/drafts/acceptance": Metric(
        "share", "Chance that a drafted token was right if all before it in its draft were. Plans go by it."
    ),
    "generation/drafts/seconds": Metric("seconds", "Time of looking for drafts, all instances together."),
    "generation/drafts/unreadable": Metric("number", "Times that responses of an earlier step could not be read."),
    "generation/prefixes/tokens_sent": Metric("tokens", "Of shared prefixes: whose keys and values were sent."),
    "generation/prefixes/tokens_fetched": Metric("tokens", "Of shared prefixes: whose keys and values were fetched."),
    "generation/prefixes/bytes_sent": Metric("bytes", "Keys and values that were sent."),
    "generation/prefixes/bytes_fetched": Metric("bytes", "Keys and values that were fetched."),
    "generation/prefixes/seconds_sent": Metric("seconds", "Time of sending, all instances together."),
    "generation/prefixes/seconds_fetched": Metric("seconds", "Time of fetching, all instances together."),
    "weights/bytes_same_node": Metric(
        "bytes",
        "On a cluster: bytes of new weights that generation instances on the learner's node read, since the step before"
        " was learnt. Each instance counts a version once.",
    ),
    "weights/bytes_same_zone": Metric(
        "bytes", "The same of instances on other nodes of its zone, or of another domain of `placement.topologyKeys`."
    ),
    "weights/bytes_across_zones": Metric("bytes", "The same of instances in other zones."),
    "weights/bytes_other_node": Metric("bytes", "The same of instances on other nodes, where zones are not known."),
    "weights/bytes_fetched": Metric(
        "bytes", "Bytes that generation instances fetched for the step's weights, with an object store."
    ),
    "weights/deltas": Metric("number", "Files that they made of the version before and of what changed."),
    "weights/deltas_refused": Metric(
        "number", "Files that they could not make so, because what changed was missing or damaged: fetched whole."
    ),
    "weights/seconds": Metric("seconds", "Until the last actor of the step had its weights."),
    "learning/beyond_preparation": Metric(
        "seconds", "Of a learner that followed preparation: from the last prepared group to the new weights."
    ),
    "learning/instances": Metric("instances", "Instances that took the step together."),
    "learning/instances_chosen": Metric(
        "instances", "Instances that the plan wanted, where `learning.instances` left it a choice."
    ),
    "planning/expected_seconds": Metric("seconds", "What the plan expected of generation."),
    "planning/expected_step_seconds": Metric("seconds", "What the plan expected of the step, to the new weights."),
    "planning/contention": Metric("share", "Of the pool's GPU time: what other jobs wanted when the step was planned."),
    "planning/lower_bound_instance_seconds": Metric(
        "instance-seconds",
        "Least that the step's generation could have cost, knowing all lengths, and where tokens are drafted, with"
        " drafts that are all right.",
    ),
    "planning/lower_bound_share": Metric(
        "share",
        "That bound over what generation's instances really cost. Not with `async`, which generates for other steps"
        " meanwhile.",
    ),
    "prediction/seen_share": Metric("share", "Prompts that had been visited before."),
    "prediction/rank_correlation": Metric("number", "Spearman's ρ of predicted and actual lengths of all samples."),
    "prediction/prompt_rank_correlation": Metric("number", "The same of the prompts' means."),
    "prediction/relative_error": Metric(
        "number", "Error of the predicted lengths over the actual, mean of the samples."
    ),
    "prediction/bias": Metric("number", "Sum of predicted over sum of actual lengths, minus 1: positive is too long."),
}
"""What the control plane adds: how generation went, and how good its plan was."""

STEP_METRICS = {**PREPARATION_METRICS, **DRIVER_METRICS, **LEARNING_METRICS}
"""What `metrics` of a step may have. Where preparation and learning both measure something it is learning's."""

EVALUATION_METRICS = {
    "accuracy": Metric("reward", "Mean reward on the evaluation's prompts, by the evaluation's rewards."),
    **PREPARATION_METRICS,
}
"""What `evaluation` of a step may have."""


def metric_named(
    name: str, catalogue: dict[str, Metric], rewards: Collection[str], logged: Collection[str] = ()
) -> Metric | None:
    """What a name of `metrics.jsonl` means; None for one that is not in the catalogue.

    Args:
        catalogue: where to look.
        rewards: names of the job's rewards.
        logged: what their functions log.
    """
    found = catalogue.get(name)
    if found is not None or not name.startswith("reward/"):
        return found
    reward, _, rest = name.removeprefix("reward/").partition("/")
    if reward not in rewards:
        return None
    pattern = "/".join(["reward/<reward>", *([rest] if rest else [])])
    return catalogue.get("reward/<reward>/<logged>" if rest in logged else pattern)
