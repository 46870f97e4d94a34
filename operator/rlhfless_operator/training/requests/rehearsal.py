"""The emulated GPUs of a rehearsal, in numbers for its instances."""

from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.job.instance_gpus import needed_gpus
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.latency.devices import (
    STATE_BYTES,
    WEIGHT_BYTES,
    find_profile,
    learning_token_seconds,
    preparation_token_seconds,
    state_move_seconds,
)
from rlhfless_operator.planner.latency.drafting import LONGEST_DRAFT, Drafts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.costs.measured_drafts import measured_drafts
from rlhfless_operator.training.costs.model_shape import find_shape
from rlhfless_operator.training.requests.builder import RequestBuilder


def emulation_of(job: RLHFJob) -> EmulationSettings | None:
    """Return the GPUs to emulate; None for a job that is no rehearsal.

    Raises:
        ValueError: for a model that is not known or fits no such GPU, naming the field.
    """
    rehearsal = job.spec.rehearsal
    if rehearsal is None:
        return None
    field = "rehearsal.model" if rehearsal.model else "model.source"
    shape = find_shape(rehearsal.model or job.spec.model.source, field)
    profile = find_profile(shape, rehearsal.gpu, rehearsal.gpus, startup_seconds=rehearsal.startup)
    requests = RequestBuilder(job, JobFolder(""), "")
    latency = profile.latency.lines[0]
    if rehearsal.draft_acceptance is not None:
        drafts: Drafts | None = Drafts(rehearsal.draft_coverage, rehearsal.draft_acceptance)
    else:
        drafts = measured_drafts(rehearsal.trace)
    weight_load_seconds = profile.weight_load_seconds if rehearsal.weight_load is None else rehearsal.weight_load
    learner_gpus = needed_gpus(job.spec)["learning"]
    # Each GPU of the learner reads and writes its own part, as fast as a GPU of generation reads weights.
    learning_load_seconds = weight_load_seconds * rehearsal.gpus / learner_gpus
    return EmulationSettings(
        trace=rehearsal.trace,
        prompts_per_step=job.spec.batch.prompts_per_step,
        acts=job.spec.environment is not None,
        step_seconds=latency.step_seconds,
        sequence_seconds=latency.sequence_seconds,
        context_seconds=latency.context_seconds,
        prefill_token_seconds=latency.prefill_token_seconds,
        draft_seconds=latency.draft_seconds,
        draft_coverage=drafts.coverage if drafts is not None else 0.0,
        draft_acceptance=drafts.acceptance if drafts is not None else 0.0,
        longest_draft=drafts.longest if drafts is not None else LONGEST_DRAFT,
        kv_tokens=profile.kv_tokens,
        max_batch=rehearsal.max_batch,
        prefix_cache=rehearsal.prefix_cache,
        startup_seconds=rehearsal.startup,
        weight_load_seconds=weight_load_seconds,
        preparation_token_seconds=preparation_token_seconds(
            shape, rehearsal.gpu, rehearsal.gpus, requests.passes.preparation
        ),
        preparation_load_seconds=requests.passes.preparation * weight_load_seconds,
        learning_token_seconds=learning_token_seconds(shape, rehearsal.gpu, learner_gpus, requests.passes.learning),
        learning_move_seconds=state_move_seconds(shape, rehearsal.gpu, learner_gpus),
        learning_load_seconds=learning_load_seconds,
        learning_store_seconds=learning_load_seconds * STATE_BYTES / WEIGHT_BYTES,
        update_seconds=rehearsal.update,
        time_scale=rehearsal.time_scale,
    )
