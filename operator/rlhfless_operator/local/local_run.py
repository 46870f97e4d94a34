"""`rlhfless run`: one driver on this machine, with function processes and a live view."""

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import Stage
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.errors import UserError
from rlhfless_operator.formatting import format_clock, format_money
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.functions_process import check_functions
from rlhfless_operator.local.gpu_assignment import GpuAssignment, assign_gpus
from rlhfless_operator.local.view import TrainingView, ViewState
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.platforms.base import Platform, StateListener
from rlhfless_operator.platforms.local.environment_server import EnvironmentServer, ServingEnvironment, check_command
from rlhfless_operator.platforms.local.gpus import gpu_products, visible_gpus
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.platforms.local.shelter import ShelterProcess
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.report import write_report
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.journal.begun_job import changes_since, named
from rlhfless_operator.training.journal.budget import BudgetExhaustedError, used
from rlhfless_operator.training.journal.step_journal import StepJournal, read_status
from rlhfless_operator.training.requests.builder import RequestBuilder
from rlhfless_operator.training.requests.rehearsal import emulation_of
from rlhfless_operator.training.run import AvailableGpus, TrainingRun

_REFRESH_SECONDS = 0.25


class JobFinishedError(UserError):
    """The job has already finished; the message says what to do about it."""


class JobChangedSinceItsEndError(UserError):
    """The job has already finished with a different document."""


def threads_of(actors: ActorRange, preparers: int, threads: int) -> dict[Stage, int]:
    """Return the CPU threads of an instance of each stage.

    Instances of generation work side by side and share the threads, and so do those of preparation. The learner works
    alone, and preparation mostly does too.
    """
    return {
        "generation": max(1, threads // actors.most),
        "preparation": max(1, threads // preparers),
        "learning": threads,
    }


async def run_locally(job: RLHFJob, root: str, *, threads: int) -> dict[str, Any]:
    """Train a job on this machine, and write a report.

    Args:
        job: the job, with resolved paths.
        root: URI of the job's folder.
        threads: CPU threads to divide among the instances.

    Raises:
        FunctionsMissingError: torch and other packages are not installed.
        EnvironmentServerError: the job runs its environment's server, but not on this machine.
        ValueError: the GPUs of a rehearsal can't be emulated.
        TooFewGpusError: an instance needs more GPUs than the machine has.
        BudgetExhaustedError: the job is suspended, because its next step would exceed its budget.
        JobFinishedError: the job has already finished.
        JobChangedSinceItsEndError: the job has already finished with a different document.
    """
    emulation = emulation_of(job)
    check_functions("torch" if emulation is None else "pyarrow")
    folder = JobFolder(root)
    gpus = visible_gpus() if emulation is None else ()
    assignment = assign_gpus(job, RequestBuilder(job, folder, ""), gpus)
    products = await asyncio.to_thread(gpu_products, assignment.gpus) if assignment.gpus else ()
    status = read_status(folder)
    _refuse_finished(job, folder, status)
    shown = status.step if status is not None and status.step else -1
    local = artifacts.local_path(root)
    log_path = (local or Path(tempfile.mkdtemp(prefix="rlhfless-"))) / "logs" / "instances.jsonl"

    if job.spec.environment_server is not None:
        check_command(job.spec.environment_server)

    by_stage = threads_of(assignment.actors, job.spec.preparation.instances.set_aside, threads)
    # Where the work is on CPUs, instances share those as others share GPUs.
    cpus = SharedGpus(threads, by_stage) if emulation is None and not assignment.gpus else None

    def make_platform(on_state: StateListener) -> Platform:
        return _platform(job, emulation, assignment, by_stage, log_path, on_state)

    shelter = ShelterProcess(log_path, emulation) if job.spec.may_let_actors_go else None
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    with TrainingView(job.metadata.name, job.spec.steps or 0, after=shown) as view:
        async with _watching(view) as watch:

            def opened(run: TrainingRun, journal: StepJournal) -> None:
                for line in _opening_lines(job, journal.status.step, assignment, emulation):
                    view.say(line)
                watch(run, journal)

            progress = LiveProgress(on_note=view.say)
            try:
                summary = await drive(
                    job,
                    folder,
                    make_platform,
                    progress,
                    _available(assignment, cpus, shelter, products),
                    on_open=opened,
                )
            except BudgetExhaustedError:
                view.say(f"  report  {await asyncio.to_thread(write_report, root)}")
                raise
            finally:
                if shelter is not None:
                    await shelter.close()
        report = await asyncio.to_thread(write_report, root)
        for line in _closing_lines(job, root, report, summary):
            view.say(line)
    return summary


def _platform(
    job: RLHFJob,
    emulation: EmulationSettings | None,
    assignment: GpuAssignment,
    threads: dict[Stage, int],
    log_path: Path,
    on_state: StateListener,
) -> Platform:
    """Return the platform of a job's instances, with the job's own server of environments if it has one."""
    platform = LocalPlatform(
        keep_alive=job.spec.keep_alive_seconds(),
        threads=threads,
        log_path=log_path,
        on_state=on_state,
        stall_seconds=job.spec.limits.stall,
        emulation=emulation,
        gpus=assignment.gpus,
        gpus_per_instance=assignment.per_instance,
    )
    server = job.spec.environment_server
    if server is None:
        return platform
    return ServingEnvironment(platform, EnvironmentServer(server, log_path.with_name("environment.log"), on_state))


def _available(
    assignment: GpuAssignment, cpus: SharedGpus | None, shelter: ShelterProcess | None, products: Sequence[str]
) -> AvailableGpus:
    """Return the GPUs, or the CPU threads, for a job's instances."""
    return AvailableGpus(
        assignment.actors,
        assignment.preparers,
        shared=assignment.shared,
        whole=cpus,
        shelter=shelter,
        gpu=products[0] if len(products) == 1 else None,
    )


def view_state(run: TrainingRun, journal: StepJournal) -> ViewState:
    """Return the present state of a run for the view."""
    now = time.monotonic()
    progress = run.progress
    money, gpu_seconds = journal.spent(now)
    generating = "generation" in progress.under_way.values()
    return ViewState(
        job=run.job.metadata.name,
        steps=run.prompts.total_steps,
        stage=progress.stage_name,
        under_way=progress.stages,
        done=progress.finished if generating else 0,
        wanted=progress.samples if generating else 0,
        seconds=journal.status.seconds + now - journal.committed_at,
        cost=money,
        currency=run.spec.prices.currency,
        budget_used=used(journal.budget(), run.spec, money, gpu_seconds),
        instances={(stage, state): count for (stage, state), count in journal.ledger.instances().items()},
        records=tuple(journal.records),
    )


@contextlib.asynccontextmanager
async def _watching(view: TrainingView) -> AsyncIterator[Callable[[TrainingRun, StepJournal], None]]:
    """Yield a function that starts the view of a run. At the end, the view is updated once more."""
    watching: list[asyncio.Task[None]] = []
    try:
        yield lambda run, journal: watching.append(asyncio.create_task(_watch(run, journal, view)))
    finally:
        for task in watching:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _watch(run: TrainingRun, journal: StepJournal, view: TrainingView) -> None:
    try:
        while True:
            view.update(view_state(run, journal))
            await asyncio.sleep(_REFRESH_SECONDS)
    finally:
        view.update(view_state(run, journal))


def _opening_lines(
    job: RLHFJob, step: int, assignment: GpuAssignment, emulation: EmulationSettings | None
) -> Iterator[str]:
    name = job.metadata.name
    if emulation is not None:
        yield f"{name}: a rehearsal on emulated GPUs, {1 / emulation.time_scale:g} times as fast"
    if assignment.gpus:
        yield _gpu_line(job, assignment)
    if step:
        yield f"{name}: resuming after step {step}"


def _gpu_line(job: RLHFJob, assignment: GpuAssignment) -> str:
    most = assignment.actors.most
    turns = "; the stages take turns on them" if assignment.shared is not None else ""
    return f"{job.metadata.name}: GPUs {', '.join(assignment.gpus)}, for {most} actors at most{turns}"


def _refuse_finished(job: RLHFJob, folder: JobFolder, status: RLHFJobStatus | None) -> None:
    if status is None or status.phase != "Succeeded":
        return
    changes = changes_since(job, folder)
    longer = (
        any(change.within("epochs") for change in changes) if job.spec.steps is None else job.spec.steps > status.step
    )
    if not longer:
        length = "epochs" if job.spec.steps is None else "steps"
        finished = f"{job.metadata.name} has finished all of its {status.step} steps; its model is in {folder.export}."
        if changed := [change for change in changes if not change.within("budget")]:
            raise JobChangedSinceItsEndError(
                f"{finished} Since then {named(changed)}. The change had no effect: start over with --fresh, use"
                f" another metadata.name, or raise spec.{length} to continue from this model if the change allows that"
            )
        raise JobFinishedError(f"{finished} Raise spec.{length} to continue, or start over with --fresh")


def _closing_lines(job: RLHFJob, root: str, report: str, summary: dict[str, Any]) -> list[str]:
    reward = (
        f"reward {summary['reward_first']:.3f} → {summary['reward_last']:.3f}"
        if summary["reward_first"] is not None
        else ""
    )
    if "held_out_reward_before" in summary:
        reward += f"  held-out {summary['held_out_reward_before']:.3f} → {summary['held_out_reward_after']:.3f}"
    money = format_money(Decimal(summary["cost"]), summary["currency"])
    model = [] if job.spec.rehearsal else [f"  model   {artifacts.join(root, 'model')}"]
    shares = [f"{stage} {share:.0%}".replace("%", " %") for stage, share in summary["busy_share"].items()]
    held, why = summary["held_steps"], summary["holding"]
    holding = [f"  all instances stayed in {held} of these steps{f': {why}' if why else ''}"] if held else []
    barren = summary["steps_that_taught_nothing"]
    warning = [f"  warning: {barren} of these steps had nothing to learn from; see the report"] if barren else []
    return [
        f"{job.metadata.name}: {summary['steps']} steps in {format_clock(summary['seconds'])}  {reward}",
        f"  {summary['instance_seconds']:.0f} instance-seconds, {summary['idle_seconds']:.0f} of them idle  {money}",
        *([f"  of the time held, work was: {', '.join(shares)}"] if shares else []),
        *holding,
        *warning,
        *model,
        f"  report  {report}",
    ]
