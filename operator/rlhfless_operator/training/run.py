"""The objects with which a driver trains a job. None of them is replaced while it does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhfless_functions.api import STAGES, Preload, Stage
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.spec import RLHFJob, RLHFJobSpec
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.step.holding import StagesHolding
from rlhfless_operator.platforms.base import Platform, StateChange
from rlhfless_operator.platforms.shelters import ShelterHost
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.costs.generation_plan import holding_of
from rlhfless_operator.training.costs.prefix_choice import PrefixChoice
from rlhfless_operator.training.costs.step_plans import StepPlans
from rlhfless_operator.training.data.prompts import Prompts
from rlhfless_operator.training.instances.away import LettingActorsGo
from rlhfless_operator.training.instances.capacity import Capacity
from rlhfless_operator.training.instances.draft_history import DraftHistory
from rlhfless_operator.training.instances.gang import GangSize
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.instances.relays import Relays
from rlhfless_operator.training.instances.weights_traffic import WeightsTraffic
from rlhfless_operator.training.journal.lease import Lease
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.builder import RequestBuilder


@dataclass(frozen=True)
class TrainingRun:
    """A job as one driver has it in hand. The journal has its progress."""

    job: RLHFJob
    """The job with resolved paths."""
    folder: JobFolder
    """Folder of its artifacts."""
    requests: RequestBuilder
    platform: Platform
    """Platform that runs the functions."""
    capacity: Capacity
    """Instances that the loop asks the platform for."""
    generators: InstanceQueue
    """Generation instances, shared by all rollouts under way."""
    preparers: InstanceQueue
    """Preparation instances, shared by all rollouts under way."""
    prompts: Prompts
    """Datasets, and the position in the training data."""
    cost_model: CostModel
    """Lengths, speeds and stage times that the job has learnt."""
    plans: StepPlans
    prefixes: PrefixChoice
    """Choice of whether actors share prefixes of prompts."""
    learners: GangSize
    """Number of instances that learn together."""
    progress: LiveProgress
    """Progress that the terminal view shows."""
    lease: Lease
    """The driver's right to the job."""
    letting_actors_go: LettingActorsGo
    """Choice of whether actors are let go while environments work."""
    relays: Relays
    """Chain in which instances pass new weights on."""
    weights_traffic: WeightsTraffic = field(default_factory=WeightsTraffic)
    """Bytes of new weights that were read."""
    draft_history: DraftHistory = field(default_factory=DraftHistory)
    """Steps whose responses are kept to draft from."""

    @property
    def spec(self) -> RLHFJobSpec:
        """Spec of the job's document."""
        return self.job.spec

    @property
    def follows_forecasts(self) -> bool:
        """Whether instances start and end by the forecast of each rollout. Where they sleep, they cost nothing, and in
        an asynchronous job rollouts overlap."""
        return self.spec.asynchronous is None and not self.capacity.sleeps

    @property
    def learner_preload(self) -> Preload:
        """Model that a fresh learner loads before it reads a checkpoint."""
        return Preload(model=self.spec.model, weights=self.requests.initial)

    def position(self) -> dict[str, Any]:
        """Return the state that a later driver needs besides the status: the position in the data, and the learnt
        costs."""
        return {
            "cursor": self.prompts.cursor.state(),
            **self.cost_model.state(),
            "drafts": self.draft_history.state(),
            "prefixes": self.prefixes.state(),
        }

    def restore(self, position: dict[str, Any]) -> None:
        """Restore a `position`."""
        self.prompts.go_to(position["cursor"])
        self.cost_model.restore(position)
        self.draft_history.restore(position["drafts"])
        self.prefixes.restore(position["prefixes"])


@dataclass(frozen=True)
class AvailableGpus:
    """The GPUs for a job's instances here. They are not part of the job, which another machine may continue."""

    actors: ActorRange
    """Number of generation instances that a step may use."""
    preparers: ActorRange | None = None
    """Number of preparation instances that a step may use; None for those of a job without GPUs."""
    shared: SharedGpus | None = None
    """GPUs that stages use in turns, because they cannot all have theirs at once; None if they can."""
    whole: SharedGpus | None = None
    """GPUs that an instance holds until it ends, as far as a job may have them, or CPU threads where it has no GPUs;
    None if they are not counted."""
    draining_seconds: float = 0.0
    """Seconds that a released instance is charged for until its GPUs are free."""
    contention: Callable[[], Contention] = lambda: ALONE
    """Returns the GPUs that other jobs leave; called for each plan."""
    shelter: ShelterHost | None = None
    """Process that keeps episodes while actors are let go; None if there is none here."""
    gpu: str | None = None
    """Name of the GPUs, if it is known. The first plans use its tables."""


def open_run(
    job: RLHFJob,
    folder: JobFolder,
    lease: Lease,
    status: RLHFJobStatus,
    make_platform: Callable[[Callable[[StateChange], None]], Platform],
    progress: LiveProgress,
    gpus: AvailableGpus,
    latency: LinearLatency | None = None,
) -> tuple[TrainingRun, StepJournal]:
    """Open a driver's run of a job, and its journal.

    Args:
        lease: this driver's right to the job.
        status: as the last driver left it, with this incarnation's uid.
        make_platform: where the functions run, given what is told of state changes.
        gpus: those that the job's instances have.
        latency: of its instances, before any was measured; None if nothing is known.
    """
    journal = StepJournal(job.spec, folder, lease, status)
    cost_model = CostModel(
        job.spec, gpus.actors, gpus.contention, latency=latency, shared=gpus.shared, preparers=gpus.preparers
    )
    relays = Relays()

    def on_state(change: StateChange) -> None:
        journal.ledger.observe(change)
        cost_model.instance_changed(change)
        relays.instance_changed(change)

    platform = make_platform(on_state)
    keep_alive: dict[Stage, float | None] = {stage: getattr(job.spec, stage).keep_alive for stage in STAGES}
    shared, sleeps = gpus.shared, gpus.shared is not None
    capacity = Capacity(
        *(platform, keep_alive, cost_model.history),
        shared=shared,
        whole=gpus.whole,
        draining_seconds=gpus.draining_seconds,
    )
    prefixes = PrefixChoice(job.spec, gpus.actors, cost_model.history)
    least: dict[Stage, int] = {
        "generation": 1,
        "preparation": job.spec.preparation.instances.min,
        "learning": job.spec.learning.instances.min - 1,
    }
    room = shared or gpus.whole
    # A learner that is not kept between its tasks would lose what it has accumulated.
    stays = shared is None or keep_alive["learning"] is None
    # In an asynchronous job stages work beside each other in any case.
    beside = job.spec.asynchronous is not None or room is None or room.has_room("learning", least)
    overlaps = stays and beside
    requests = RequestBuilder(
        job, folder, status.uid, sleeps=sleeps, overlaps=overlaps, shares_prefixes=lambda: prefixes.able
    )
    prompts = Prompts(job.spec, folder)
    may_hold = job.spec.asynchronous is None and not sleeps and all(kept is None for kept in keep_alive.values())

    def holding() -> StagesHolding | None:
        there = {stage: capacity.there(stage) for stage in STAGES}
        switches = {stage: capacity.switch_seconds(stage) for stage in STAGES}
        return holding_of(job.spec, cost_model.history, there, switches) if may_hold else None

    learners = GangSize(job.spec.learning.instances)
    if status.learners is not None and job.spec.chooses_learners:
        learners.choose(status.learners.instances)
    plans = StepPlans(cost_model, prompts, follows=requests.learns_in_pieces, gang=learners, holding=holding)
    generators, preparers = InstanceQueue("generation", capacity), InstanceQueue("preparation", capacity)
    run = TrainingRun(
        *(job, folder, requests, platform, capacity, generators, preparers, prompts, cost_model, plans, prefixes),
        learners=learners,
        progress=progress,
        lease=lease,
        letting_actors_go=LettingActorsGo(gpus.shelter, capacity, cost_model.history),
        relays=relays,
    )
    return run, journal
