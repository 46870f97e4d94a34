"""The job and its earlier steps in the planner's numbers, and its plans in tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless_functions.api import STAGES, EngineRoom, SampleTask, Stage
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.instance_prices import price_ratio
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile, Latency
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.pools.contention import Contention
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.step.async_planning import PUBLISHING, Asynchrony, lag_of_pieces
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.generation import PlannedStep, StepSetting
from rlhfless_operator.planner.step.holding import StagesHolding, Staying
from rlhfless_operator.planner.step.learner_scaling import LearnerOption, sizes
from rlhfless_operator.planner.step.planning import Limits, longest_first

WEIGHTS = "weights"
"""The history's name for how long engines take until they have a step's weights."""
SWITCH = "switch"
"""The history's name for how long actors stand still for weights that are swapped in flight."""


@dataclass(frozen=True)
class GenerationPlan:
    """A step's plan in the words of the wire contract, and what it rests on."""

    planned: PlannedStep
    shares: list[list[SampleTask]]
    """The plan's shares, longest expected time first."""
    estimates: Mapping[int, LengthEstimate]
    """Predicted lengths as they were when the step was planned."""
    wanted_by_others: float = 0.0
    """The share of the pool's GPU time that other jobs wanted when the step was planned."""


def limits_of(spec: RLHFJobSpec, actors: ActorRange, room: EngineRoom | None) -> Limits:
    """Return what a job's plans must keep to.

    Args:
        actors: how many there may be.
        room: what the instances have said to have room for; without it, only `generation.kvBudgetTokens` is known.
    """
    kv_tokens, max_batch = spec.generation.kv_budget_tokens, None
    if room is not None:
        kv_tokens, max_batch = min(room.kv_tokens, kv_tokens or room.kv_tokens), room.sequences
    return Limits(actors.least, actors.most, kv_tokens, max_batch)


def price_of(spec: RLHFJobSpec, stage: Stage) -> float:
    """Return the price of an instance of a stage in instances of generation: that of its GPUs if the job names no
    price."""
    if spec.prices.given:
        return price_ratio(spec.instance_prices, stage)
    own, others = spec.instance_gpus[stage], spec.instance_gpus["generation"]
    return own / others if own and others else 1.0


def holding_of(
    spec: RLHFJobSpec, history: History, there: Mapping[Stage, int], switch_seconds: Mapping[Stage, float]
) -> StagesHolding | None:
    """Return the costs of keeping the instances of all stages for a whole step; None before a step was learnt.

    Args:
        there: number of instances of each stage that are there.
        switch_seconds: instance-seconds of letting one go and having another.
    """
    if not (learning_seconds := history.mean("learning")):
        return None
    generation, preparation, learning = (
        Staying(there[stage], switch_seconds[stage], price_of(spec, stage)) for stage in STAGES
    )
    # Instances of generation start while the step before is learnt, once all of it is prepared.
    hidden = history.mean("learning/beyond", learning_seconds)
    late = max(0.0, history.mean("startup/generation") - hidden)
    return StagesHolding(generation, preparation, learning, late)


def training_of(
    spec: RLHFJobSpec,
    history: History,
    learners: Sequence[LearnerOption],
    preparers: ActorRange,
    *,
    follows: bool,
    learning_instances: int = 1,
    holding: StagesHolding | None = None,
    shared: SharedGpus | None = None,
) -> Training:
    """Return what preparation and learning take and cost, as earlier steps have shown it.

    Args:
        learners: numbers of learning instances from which the `cost` policy chooses; none if there is no choice.
        preparers: how many preparation instances a step may use.
        follows: whether learning may begin before the batch is complete.
        learning_instances: number of them if there is no choice.
        holding: costs of keeping all instances; None if they can't be kept.
        shared: GPUs on which the stages take turns; None if they can all have theirs at once.
    """
    accumulation = history.mean("learning/token") if follows else 0.0
    # An instance may count as awake while it loads its models, or only then.
    waking = max(history.mean("waking/preparation"), history.mean("preparation/load"))
    return Training(
        gpus=1,
        token_gpu_seconds=history.mean("preparation/token"),
        start_seconds=0.0,
        update_seconds=0.0,
        preparation_price=price_of(spec, "preparation"),
        learning_price=price_of(spec, "learning"),
        preparers=tuple(sizes(preparers.least, preparers.most)),
        preparer_start_seconds=0.0 if shared is None else waking,
        preparer_idle_seconds=idle_seconds(history, "preparation"),
        afterwards_seconds=history.mean("learning/rest" if accumulation else "learning"),
        accumulation_token_seconds=accumulation,
        learners=tuple(learners),
        follows=accumulation > 0,
        learning_instances=learning_instances,
        learner_idle_seconds=idle_seconds(history, "learning"),
        holding=holding,
        shared=shared,
    )


def asynchrony_of(
    spec: RLHFJobSpec, history: History, actors: int | None, *, follows: bool = False
) -> Asynchrony | None:
    """Return how a job generates ahead of its learner; None if it does not.

    Args:
        actors: number of actors of the plan before.
        follows: whether learning may begin before the batch is complete.
    """
    ahead = spec.asynchronous
    if ahead is None:
        return None
    recomputes = ahead.new_weights == "switch" and ahead.kv_cache == "recompute"
    pause = history.mean(SWITCH, history.mean(WEIGHTS))
    lag = lag_of_pieces(history.mean("learning"), history.mean("learning/train")) if follows else None
    return Asynchrony(ahead.max_staleness, pause, recomputes, actors, lag, history.mean(PUBLISHING))


def note_publishing(history: History, metrics: Mapping[str, float]) -> None:
    """Learn the time of a publication during which the learner could take the next step.

    Args:
        metrics: of the publication; without a time if it had ended before.
    """
    if (seconds := metrics.get("seconds/publish")) is not None:
        history.add(PUBLISHING, seconds)


def setting_of(
    spec: RLHFJobSpec,
    limits: Limits,
    latency: Latency,
    training: Training,
    history: History,
    contention: Contention,
    asynchrony: Asynchrony | None,
) -> StepSetting:
    """Return what a step's plan rests on besides its samples."""
    return StepSetting(
        InstanceProfile(
            latency,
            gpus=1,
            kv_tokens=limits.kv_tokens or 2**53,
            startup_seconds=history.mean("startup/generation"),
            weight_load_seconds=history.mean(WEIGHTS),
        ),
        limits,
        training,
        cost_weight=spec.planning.cost_weight,
        learning_seconds=history.mean("learning"),
        contention=contention,
        asynchrony=asynchrony,
    )


def in_tasks(planned: PlannedStep, estimates: Mapping[int, LengthEstimate], contention: Contention) -> GenerationPlan:
    """Return a plan in the words of the wire contract."""
    shares = [
        [SampleTask(prompt=sample.prompt, index=sample.index) for sample in share.samples]
        for share in longest_first(planned.generation.shares)
    ]
    return GenerationPlan(planned, shares, estimates, contention.wanted)


def idle_seconds(history: History, stage: Stage) -> float:
    """Return how long a step holds an instance of a stage without work: kept until the next step, or started anew."""
    switch = history.mean(f"draining/{stage}") + history.mean(f"startup/{stage}") + history.mean(f"{stage}/load")
    return min(switch, history.mean(f"gap/{stage}", switch))
