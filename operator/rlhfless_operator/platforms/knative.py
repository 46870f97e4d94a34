"""Functions as Knative Services: pods that a stage holds while it works."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import aiohttp

from rlhfless_functions.api import Event, Failed, Preload, RunRequest, Stage, Started, ends_task
from rlhfless_operator.job.charged import Function
from rlhfless_operator.knative import ApiError, KnativeClient
from rlhfless_operator.platforms.base import (
    InstanceLostError,
    InstanceSilentError,
    PlatformUnavailableError,
    StateListener,
    TaskFailedError,
    takes_spare_slots,
)
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.environments import addressed, needs_server
from rlhfless_operator.platforms.pods.direct_questions import DirectQuestions
from rlhfless_operator.platforms.pods.dispatch import deliver
from rlhfless_operator.platforms.pods.environment_manifests import EnvironmentFunction
from rlhfless_operator.platforms.pods.environment_pods import EnvironmentPods
from rlhfless_operator.platforms.pods.job_objects import Endpoint, JobObjects
from rlhfless_operator.platforms.pods.manifests import JobIdentity, StageFunction
from rlhfless_operator.platforms.pods.node_places import NodePlaces
from rlhfless_operator.platforms.pods.pod_watch import PodView, PodWatch
from rlhfless_operator.platforms.pods.shelter_manifests import ShelterFunction
from rlhfless_operator.platforms.pods.shelter_pods import ShelterPods
from rlhfless_operator.platforms.pods.stage_pods import StagePods
from rlhfless_operator.platforms.pods.stage_scaler import StageScaler
from rlhfless_operator.platforms.shelters import ShelterClient
from rlhfless_operator.platforms.stream import open_session, run_task
from rlhfless_operator.platforms.turns.slot_pool import SlotShare
from rlhfless_operator.platforms.turns.turn_taking import TurnTaking

_PUBLISHED_POLL_SECONDS = 0.02
_NEWS_SECONDS = 2.0
"""Time limit for the watch to report a pod that has sent something, or the end of one whose stream broke, in
seconds."""
_CLOSING_SECONDS = 10.0
_SYNC_SECONDS = 30.0


class KnativePlatform:
    """The functions of one job on a cluster.

    Call `open` first. Any number of requests may run at a time; each uses a pod of its own.

    Args:
        client: client of the cluster.
        watch: the watch of all function pods, which all jobs share.
        job: identity of the job.
        functions: its stages.
        keep_alive: seconds that a surplus idle pod of each stage is kept.
        stall_seconds: longest silence of a stream that has begun.
        environment: the servers of its environment, if it runs them.
        shelter: the process that keeps episodes while actors are let go, if it may have one.
        slots: the job's share of its namespace's slots, for the stages whose pods use them in turns.
        places: finds the location of nodes; without it, `Started` has no location.
        on_state: called with every change of a pod's state.
        on_problem: called when a problem of pods changes, with `STAGE: text` or `slots: text`; the text is empty when
            the problem is over.
    """

    def __init__(
        self,
        client: KnativeClient,
        watch: PodWatch,
        *,
        job: JobIdentity,
        functions: Mapping[Stage, StageFunction],
        settings: ClusterSettings,
        keep_alive: Mapping[Stage, float],
        stall_seconds: float,
        on_state: StateListener,
        on_problem: Callable[[str], None] = lambda problem: None,
        environment: EnvironmentFunction | None = None,
        shelter: ShelterFunction | None = None,
        slots: SlotShare | None = None,
        places: NodePlaces | None = None,
    ) -> None:
        self._client = client
        self._watch = watch
        self._job = job
        self._functions = functions
        self._settings = settings
        self._keep_alive = keep_alive
        self._stall_seconds = stall_seconds
        self._on_problem = on_problem
        self._places = places
        self._objects = JobObjects(client, job, list(functions.values()), settings, environment, shelter)
        self._books: dict[Function, StagePods] = {
            stage: StagePods(stage, on_state, self._noticing(stage), begin_asleep=function.slots is not None)
            for stage, function in functions.items()
        }
        most = 0 if environment is None else environment.most
        self._environment = EnvironmentPods(client.revisions, job.namespace, on_state, on_problem, most)
        keeper = EnvironmentPods(client.revisions, job.namespace, on_state, on_problem, 1, "shelter")
        self._acting: dict[Function, EnvironmentPods] = {"environment": self._environment, "shelter": keeper}
        self.shelter: ShelterPods | None = None
        """Keeps episodes, once the platform is open; None if the job has none."""
        self._scalers: dict[Function, StageScaler] = {}
        self._endpoints: Mapping[Function, Endpoint] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._slots = slots
        self._turns: TurnTaking | None = None
        self._token = ""
        self._session: aiohttp.ClientSession | None = None
        self._questions: DirectQuestions | None = None
        self._first = True
        self._closed = False

    # --- what the controller calls ---

    async def open(self) -> None:
        """Create what the functions need, and wait until they can take requests.

        Raises:
            PlatformUnavailableError: this is not possible now; the message has the reason and the remedy.
        """
        token, endpoints = await self._objects.create()
        try:
            async with asyncio.timeout(_SYNC_SECONDS):
                await self._watch.synced()
        except (ApiError, TimeoutError) as error:
            raise PlatformUnavailableError(f"the pods of {self._job.namespace} can't be watched: {error}") from error
        self._token, self._endpoints = token, endpoints
        session = self._session = open_session()
        self._questions = DirectQuestions(session)
        for stage, function in self._functions.items():
            self._scalers[stage] = StageScaler(
                self._client,
                session,
                self._job.namespace,
                endpoints[stage],
                self._books[stage],
                preload=function.preload,
                keep_alive=self._keep_alive.get(stage, 0.0),
                on_problem=self._on_problem,
            )
        if self._slots is not None:
            self._turns = await self._join(self._slots, session)
        self._watch.subscribe(self._job.namespace, self._job.name, self)
        self._first = False
        await self._keep_sleeping_pods()
        self._tasks = [asyncio.create_task(scaler.run()) for scaler in self._scalers.values()]
        for each, pods in self._acting.items():
            if (served := endpoints.get(each)) is not None:
                self._tasks.append(asyncio.create_task(pods.run(served.revision)))
        if (place := endpoints.get("shelter")) is not None:
            client = ShelterClient(session, token, place.host)
            self.shelter = ShelterPods(place, client, token, self._acting["shelter"], self._environment)

    async def close(self) -> None:
        """Release all pods. The Services stay, because the job may resume. Pods are reported until they are gone."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_SECONDS):
                releasing = [scaler.release() for scaler in self._scalers.values()]
                releasing += [pods.release() for pods in self._acting.values()]
                await asyncio.gather(*releasing, return_exceptions=True)
        if self._turns is not None:
            self._turns.close()
        if self._session is not None:
            await self._session.close()
        self._forget_when_gone()

    async def remove(self) -> None:
        """Delete the Services.

        Raises:
            PlatformUnavailableError: the API server does not answer, or refuses.
        """
        await self._objects.remove()

    # --- what the training loop calls ---

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Set the wanted number of pods of a stage; see `Platform.hold`."""
        book, slots = self._books[stage], self._functions[stage].slots
        if self._slots is not None and slots is not None:
            # Pods stay asleep, and load models in their turn.
            book.most = self._slots.pool.size // slots.gpus
            book.wanted = max(book.wanted, min(count, book.most))
            self._scalers[stage].notice()
            return
        book.wanted = count
        self._scalers[stage].preload(preload)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Send a task to a free pod of its stage; see `Platform.run`."""
        with contextlib.ExitStack() as acting:
            if needs_server(request):
                request = addressed(request, self._endpoints["environment"].address)
                acting.enter_context(self._environment.used())
            try:
                async with aclosing(self._run(request)) as events:
                    async for event in events:
                        yield self._environment.explained(event) if isinstance(event, Failed) else event
            except TaskFailedError as error:
                failed = Failed(reason=error.reason, message=str(error), retryable=error.retryable)
                raise TaskFailedError(self._environment.explained(failed)) from error

    async def _run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        stage = request.key.stage
        book, scaler = self._books[stage], self._scalers[stage]
        turns = self._turns if self._turns is not None and self._turns.takes_turns(stage) else None
        book.requests += 1
        book.sending += 1
        scaler.notice()
        instance: str | None = None
        ended = False
        events = None
        try:
            if turns is None:
                events = self._send(request, book, scaler)
            else:
                instance = await turns.acquire(stage, spare=takes_spare_slots(request))
                events = turns.send(instance, request, self._stall_seconds)
            async for event in events:
                if isinstance(event, Started):
                    if instance is None:
                        instance = event.instance
                        book.taken(instance)
                    event = event.model_copy(update={"place": await self._place_of(book, event.instance)})
                ended = ends_task(event)
                yield event
        except TaskFailedError as error:
            # An instance whose engine is lost ends by itself.
            ended = True
            if error.reason == "engine_lost" and instance is not None:
                await scaler.remove_pod(instance)
            raise
        except InstanceSilentError:
            ended = True
            if instance is not None:
                await scaler.remove_pod(instance)
            raise
        except InstanceLostError as error:
            if instance is None:
                raise
            raise InstanceLostError(await self._explained(error, book, instance)) from error
        finally:
            if events is not None:
                await events.aclose()
            if instance is None:
                book.sending -= 1
            elif not ended:
                await self._published(book, scaler, instance)
            book.requests -= 1
            if instance is not None:
                book.left(instance)
            if turns is not None:
                turns.left()
            scaler.notice()

    # --- what the watch tells ---

    def pod_changed(self, pod: PodView) -> None:
        """Handle a pod that is new or has changed."""
        if (acting := self._acting.get(pod.stage)) is not None:
            acting.changed(pod)
        elif (book := self._books.get(pod.stage)) is not None:
            book.changed(pod, first=self._first)
            if self._turns is not None:
                self._turns.pod_changed(pod, first=self._first)

    def pod_gone(self, pod: PodView) -> None:
        """Handle a pod that is gone."""
        if (acting := self._acting.get(pod.stage)) is not None:
            acting.gone(pod)
        elif (book := self._books.get(pod.stage)) is not None:
            book.gone(pod)
            if self._turns is not None:
                self._turns.pod_gone(pod)
        self._forget_when_gone()

    def replaced(self) -> None:
        """Stop reporting: another driver has taken the job over, and reports its pods from now on."""
        for book in self._books.values():
            book.forget()
        for acting in self._acting.values():
            acting.forget()

    # --- requests ---

    async def _join(self, slots: SlotShare, session: aiohttp.ClientSession) -> TurnTaking:
        async def remove(stage: Function, pod: str) -> None:
            await self._scalers[stage].remove_pod(pod)

        turns = TurnTaking(
            slots.pool,
            self._job.uid,
            {stage: self._books[stage] for stage, function in self._functions.items() if function.slots is not None},
            session=session,
            token=self._token,
            start_timeout=self._settings.start_timeout,
            remove=remove,
            problem=lambda stage: self._scalers[stage].problem,
            on_problem=self._on_problem,
        )
        try:
            await slots.pool.join(turns, slots.member)
        except PlatformUnavailableError:
            await session.close()
            raise
        return turns

    def _send(self, request: RunRequest, book: StagePods, scaler: StageScaler) -> AsyncGenerator[Event, None]:
        """Yield the events of the first attempt that a pod takes; see `deliver`."""
        assert self._session is not None, "open() comes first"
        session, endpoint = self._session, self._endpoints[request.key.stage]

        def attempt(start_seconds: float) -> AsyncGenerator[Event, None]:
            return run_task(
                session,
                endpoint.url,
                self._token,
                request,
                stall_seconds=self._stall_seconds,
                start_seconds=start_seconds,
                host=endpoint.host,
            )

        return deliver(attempt, book, lambda: scaler.problem, self._settings.start_timeout)

    async def _place_of(self, book: StagePods, instance: str) -> list[str]:
        view = book.view(instance)
        return await self._places.of(view.node) if view is not None and self._places is not None else []

    async def _published(self, book: StagePods, scaler: StageScaler, instance: str) -> None:
        """Wait until a cut task has published its partial results, by asking its pod directly.

        If pods can't be reached, don't wait: the pod refuses other requests until it is done.
        """
        questions = self._questions
        if questions is None or not questions.reach:
            return
        begun = time.monotonic()
        while instance in book.names:
            waited = time.monotonic() - begun
            view = book.view(instance)
            if view is None or view.ip is None:
                # A line may arrive before the watch has reported its pod.
                if waited > _NEWS_SECONDS:
                    return
            elif not await questions.is_busy(view.ip):
                return
            elif waited > self._stall_seconds:
                await scaler.remove_pod(instance)
                return
            await asyncio.sleep(_PUBLISHED_POLL_SECONDS)

    async def _explained(self, error: InstanceLostError, book: StagePods, instance: str) -> str:
        """Return the error, with the fate of the pod."""
        deadline = time.monotonic() + _NEWS_SECONDS
        while not (problem := book.problem(instance)) and time.monotonic() < deadline:
            view = book.view(instance)
            if view is None or view.deleting:
                problem = f"{instance} was deleted"
                break
            await asyncio.sleep(_PUBLISHED_POLL_SECONDS)
        return f"{error}; {problem}" if problem else str(error)

    # --- the rest ---

    async def _keep_sleeping_pods(self) -> None:
        """Hold an earlier driver's pods that take turns: their sleep costs no GPU, and starting others does."""
        for stage, function in self._functions.items():
            if self._slots is not None and function.slots is not None:
                await self.hold(stage, self._books[stage].there)

    def _noticing(self, stage: Stage) -> Callable[[], None]:
        def notice() -> None:
            if not self._closed and stage in self._scalers:
                self._scalers[stage].notice()

        return notice

    def _forget_when_gone(self) -> None:
        known = [book.names for book in self._books.values()] + [pods.names for pods in self._acting.values()]
        if self._closed and not any(known):
            self._watch.unsubscribe(self._job.namespace, self._job.name, self)
