"""The requests of one job: pure functions from the job and its status to the wire contract."""

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from rlhfless_functions.api import (
    BatchReference,
    ExportRequest,
    Gang,
    GenerationRequest,
    LearnRequest,
    LearnResult,
    MaterializeRequest,
    NextWeights,
    Preload,
    PrepareRequest,
    Prompting,
    Purpose,
    SampleTask,
    SaveRequest,
    Stage,
    StepSettings,
    TaskKey,
    TrainingProgress,
    UnpublishedVersion,
    WeightsReference,
)
from rlhfless_functions.artifacts import join
from rlhfless_functions.settings import AlgorithmSettings, DataSettings, EngineSettings, LearningSettings
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.settings_history import SettingsHistory
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.costs.passes import Passes
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing

_HEARTBEAT_SECONDS = 5.0


class RequestBuilder:
    """Makes the requests of one job.

    Args:
        job: the job with resolved paths.
        folder: the job's artifacts.
        uid: unique id of the job's incarnation.
        sleeps: whether idle instances give their devices' memory back between tasks.
        overlaps: whether there are GPUs for a learner while others generate.
        shares_prefixes: returns whether instances are started with the means to share prefixes.
    """

    def __init__(
        self,
        job: RLHFJob,
        folder: JobFolder,
        uid: str,
        *,
        sleeps: bool = False,
        overlaps: bool = True,
        shares_prefixes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec = job.spec
        self._folder = folder
        self._uid = uid
        self._sleeps = sleeps
        self._overlaps = overlaps
        self._shares_prefixes = shares_prefixes
        self.algorithm: AlgorithmSettings = job.spec.algorithm.resolved()
        self.passes = Passes(job.spec)
        self.initial = WeightsReference(version=0, uri=job.spec.model.source)
        # A stream that may be silent for less than a heartbeat would be dropped for no reason.
        self._heartbeat = min(_HEARTBEAT_SECONDS, job.spec.limits.stall / 3)

    @property
    def engine(self) -> EngineSettings:
        """Settings of the generation instances' engine."""
        generation, sampling = self._spec.generation, self._spec.sampling
        return EngineSettings(
            name=generation.engine,
            vllm=generation.vllm,
            sequence_tokens=sampling.max_prompt_tokens + sampling.max_response_tokens,
            kv_budget_tokens=generation.kv_budget_tokens,
            share_prefixes=self._shares_prefixes(),
            drafting=generation.drafting,
            sleeps=self._sleeps,
        )

    @property
    def drafts(self) -> bool:
        """Whether tokens may be drafted, so that responses are kept for it."""
        return self._spec.generation.drafting == "auto"

    @property
    def relays_weights(self) -> bool:
        """Whether instances pass weights on. A rehearsal has no weights."""
        return self._spec.generation.weight_relays == "auto" and self._spec.rehearsal is None

    def weights_line(self, version: int) -> str | None:
        """Return the folder in which instances that fetch a version find each other; None if they only read the
        store."""
        return self._folder.line(version) if self.relays_weights else None

    def preload(self, weights: WeightsReference) -> Preload:
        """Return what a fresh instance of generation loads before its first request."""
        line = self.weights_line(weights.version)
        return Preload(model=self._spec.model, weights=weights, engine=self.engine, weights_line=line)

    @property
    def _publishes_deltas(self) -> bool:
        return self._spec.learning.weight_deltas == "auto" and self._spec.model.lora is None

    @property
    def learns_in_pieces(self) -> bool:
        """Whether a step's batch is cut into pieces as its groups arrive. Their gradients are accumulated."""
        return self._spec.may_learn_in_pieces and self._overlaps

    def data(self, purpose: Purpose) -> DataSettings:
        """Return the dataset of a purpose."""
        if purpose == "training":
            return self._spec.data
        assert self._spec.evaluation is not None
        return self._spec.evaluation.data

    def materialize(self, purpose: Purpose, attempt: int) -> MaterializeRequest:
        """Make the request to read, tokenize and publish a dataset."""
        return MaterializeRequest(
            key=self._key(0, "preparation", f"data-{purpose}", attempt),
            result=self._folder.result(f"data-{purpose}", 0),
            heartbeat_seconds=self._heartbeat,
            model=self._spec.model,
            data=self.data(purpose),
            sampling=self._spec.sampling,
            sink=self._folder.data(purpose),
            rewards=self._spec.rewards if purpose == "training" else self._spec.evaluation_rewards,
            most_dropped=self._spec.limits.dropped_prompts,
            environment=self._spec.asked_environment,
        )

    def generate(
        self,
        step: int,
        purpose: Purpose,
        oldest_version: int | None,
        sharing: PrefixSharing | None,
        draft_steps: Callable[[Collection[int]], Sequence[int]],
        attempt: ActorAttempt,
        *,
        weights_from: Sequence[str] = (),
        further_prompts: Collection[int] = (),
    ) -> GenerationRequest:
        """Make the request for an actor's unfinished samples.

        Args:
            oldest_version: the oldest weights whose tokens are kept; None for those of the attempt's weights only.
            sharing: prefixes that the step's actors share.
            draft_steps: returns the steps whose responses may be like those to these training prompts.
            attempt: the actor's samples.
            weights_from: the chain of instances that may pass the attempt's weights on.
            further_prompts: training prompts whose samples may be added.
        """
        folder = self._folder.prefixes(step, purpose)
        prompts = {*further_prompts, *(sample.prompt for sample in attempt.samples)} if purpose == "training" else set()
        return GenerationRequest(
            key=self._key(step, "generation", attempt.actor, attempt.number),
            result=join(attempt.sink, "result.json"),
            heartbeat_seconds=self._heartbeat,
            purpose=purpose,
            model=self._spec.model,
            weights=attempt.weights,
            oldest_version=oldest_version,
            keep_kv_cache=oldest_version is not None and self._spec.keeps_kv_cache,
            weights_from=list(weights_from) if self.relays_weights else None,
            weights_line=self.weights_line(attempt.weights.version),
            prompts=self._folder.data(purpose),
            samples=attempt.samples,
            sampling=self._spec.sampling if purpose == "training" else self._spec.evaluation_sampling,
            seed=self._spec.seed,
            sink=attempt.sink,
            resume_from=attempt.resume_from,
            known_until=attempt.known_until,
            flush_seconds=self._spec.generation.flush,
            kv_budget_tokens=self._spec.generation.kv_budget_tokens,
            engine=self.engine,
            shared_prefixes=sharing.of(attempt.actor, attempt.samples, folder) if sharing is not None else None,
            drafts=[self._folder.drafts(each) for each in draft_steps(prompts)] if self.drafts else None,
            draft_prompts=list(further_prompts) if self.drafts else [],
            environment=self._spec.asked_environment,
            shelter=attempt.shelter,
            chat_template_kwargs=self.data(purpose).chat_template_kwargs if self._spec.asked_environment else {},
        )

    def source_of(self, weights: WeightsReference, chain: Callable[[int], Sequence[str]]) -> NextWeights:
        """Return weights with the places that instances fetch them from.

        Args:
            chain: returns the instances that may pass a version on.
        """
        return NextWeights(
            weights=weights,
            weights_from=list(chain(weights.version)) if self.relays_weights else None,
            weights_line=self.weights_line(weights.version),
        )

    def next_weights(
        self, present: WeightsReference, count: int, chain: Callable[[int], Sequence[str]]
    ) -> list[NextWeights]:
        """Return the next versions that may be published while a request decodes; none in a rehearsal.

        Args:
            count: number of versions.
            chain: returns the instances that may pass a version on.
        """
        if self._spec.rehearsal is not None:
            return []
        lora = self._spec.model.lora is not None
        versions = range(present.version + 1, present.version + count + 1)
        following = (
            WeightsReference(
                version=version,
                uri=self.initial.uri if lora else self._folder.weights(version),
                adapter=self._folder.weights(version) if lora else None,
            )
            for version in versions
        )
        return [self.source_of(weights, chain) for weights in following]

    def prepare(
        self,
        step: int,
        purpose: Purpose,
        weights: WeightsReference,
        critic: WeightsReference | None,
        part: str,
        attempt: int,
        samples: Sequence[SampleTask],
        rollouts: list[str],
        visits: Mapping[int, int],
        examples: Collection[SampleTask] = (),
        *,
        by_group: bool = False,
        progress: TrainingProgress | None = None,
    ) -> PrepareRequest:
        """Make the request to prepare a chunk of complete groups.

        Args:
            visits: number of earlier visits of each prompt.
            examples: samples of the step to be had as text.
            by_group: whether to return metrics of each group.
            progress: position of the training, which rewards may read.
        """
        folder = self._folder.batches(step, purpose)
        training = purpose == "training"
        return PrepareRequest(
            key=self._key(step, "preparation", part, attempt),
            result=join(folder, f"{part}.json"),
            heartbeat_seconds=self._heartbeat,
            purpose=purpose,
            model=self._spec.model,
            prompts=self._folder.data(purpose),
            rollouts=rollouts,
            samples=list(samples),
            rewards=self._spec.rewards if training else self._spec.evaluation_rewards,
            progress=progress or TrainingProgress(),
            algorithm=self.algorithm,
            sampling=self._spec.sampling if training else self._spec.evaluation_sampling,
            policy=weights,
            old_log_probs=training and (self.passes.prepares_log_probs or self.passes.policy_is_frozen(step)),
            reference=self.initial if training and self.passes.has_reference else None,
            advantages=self.passes.prepares_advantages,
            critic=critic if training and self.passes.prepares_advantages else None,
            microbatch_tokens=self._spec.batch.microbatch_tokens,
            share_prompts=self._spec.learning.share_prompts,
            pack=self._spec.learning.pack,
            sink=join(folder, f"{part}.parquet"),
            examples=[sample for sample in samples if sample in examples],
            trace=self._folder.trace(step, part) if training else None,
            drafts=join(self._folder.drafts(step), f"{part}.parquet") if training and self.drafts else None,
            visits={sample.prompt: visits[sample.prompt] for sample in samples} if training else {},
            metrics_by_group=by_group,
        )

    def step_settings(self, total_steps: int) -> StepSettings:
        """Return the settings of a step that is taken now; they may change in the middle of a job."""
        return StepSettings(optimizer=self._spec.optimizer, total_steps=total_steps)

    def learn(
        self,
        status: RLHFJobStatus,
        batch: BatchReference,
        replay: list[BatchReference],
        history: SettingsHistory,
        total_steps: int,
        *,
        checkpoint_due: bool,
        attempt: int,
        following: str | None = None,
        gang: Gang | None = None,
        before: LearnResult | None = None,
        publish_beside: bool = False,
    ) -> LearnRequest:
        """Make the request for one training step, with other learners if there is a gang.

        Args:
            replay: batches since the checkpoint, which a fresh learner repeats.
            following: the piece journal of a batch that is still being prepared.
            before: the step before, if it is learnt and the status does not name it yet.
        """
        step = batch.step
        settings = self.step_settings(total_steps)
        newest = self.weights(status.weights)
        unpublished = None
        if before is not None:
            unpublished = UnpublishedVersion(
                weights=before.weights.adapter or before.weights.uri,
                critic=before.critic.uri if before.critic is not None else None,
                since=newest.uri if self._publishes_deltas else None,
            )
        return LearnRequest(
            key=self._key(step, "learning", "learn", attempt),
            result=self._folder.result("learn", step),
            heartbeat_seconds=self._heartbeat,
            model=self._spec.model,
            initial=self.initial,
            base=before.weights if before is not None else newest,
            batch=batch,
            checkpoint=status.checkpoint.uri if status.checkpoint else None,
            checkpoint_step=status.checkpoint.step if status.checkpoint else 0,
            replay=replay,
            replay_settings=history.other_than(settings, (earlier.step for earlier in replay)),
            following=following,
            algorithm=self.algorithm,
            optimizer=settings.optimizer,
            batch_settings=self._spec.batch,
            sampling=self._spec.sampling,
            learning=LearningSettings.model_validate(
                {name: getattr(self._spec.learning, name) for name in LearningSettings.model_fields}
            ),
            total_steps=settings.total_steps,
            seed=self._spec.seed,
            publish=self._folder.weights(step),
            publish_critic=self._folder.critic(step) if self.passes.has_critic else None,
            save_checkpoint=self._folder.checkpoint(step) if checkpoint_due else None,
            publish_beside=publish_beside,
            unpublished=unpublished,
            gang=gang,
        )

    def gang(self, step: int, size: int) -> list[Gang | None]:
        """Return the gang that each of so many instances belongs to; None for a single one."""
        if size == 1:
            return [None]
        meeting = self._folder.result(f"meeting-{uuid.uuid4().hex}", step)
        within = self._spec.learning.gang_timeout
        return [Gang(size=size, number=number, meeting=meeting, within_seconds=within) for number in range(size)]

    def save(self, version: int, uri: str, attempt: int) -> SaveRequest:
        """Make the request to write a learner's state, of this version, to a checkpoint."""
        return SaveRequest(
            key=self._key(version, "learning", "save", attempt),
            result=self._folder.result("save", version),
            heartbeat_seconds=self._heartbeat,
            version=version,
            checkpoint=uri,
        )

    def prompting(self, *, chat: bool) -> Prompting:
        """Return what training puts around its prompts, which are chats or plain text."""
        data = self._spec.data.parts[0]
        return Prompting(
            chat=chat,
            system_prompt=data.system_prompt,
            chat_template_kwargs=data.chat_template_kwargs,
            stop=self._spec.sampling.stop,
        )

    def export(
        self, weights: WeightsReference, model_card: str, prompting: Prompting, destination: str, attempt: int
    ) -> ExportRequest:
        """Make the request to publish the trained model for the user."""
        return ExportRequest(
            key=self._key(weights.version, "learning", "export", attempt),
            result=self._folder.result("export", weights.version),
            heartbeat_seconds=self._heartbeat,
            model=self._spec.model,
            weights=weights,
            destination=destination,
            model_card=model_card,
            prompting=prompting,
        )

    def weights(self, newest: WeightsReference | None) -> WeightsReference:
        """Return the weights that the status names; the model as given if it names none."""
        return newest or self.initial

    def _key(self, step: int, stage: Stage, part: str, attempt: int) -> TaskKey:
        return TaskKey(job_uid=self._uid, step=step, stage=stage, part=part, attempt=attempt)
