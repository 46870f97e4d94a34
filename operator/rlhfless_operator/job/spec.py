"""The job document: one pydantic model that is the source of validation, of the CRD and of the reference page.

The numbers of the work itself (model, algorithm, rewards, data, sampling, batch, optimizer) are the settings that the
functions read; this module adds what only the control plane reads.
"""

from decimal import Decimal
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlhfless_functions.api import Stage
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    Duration,
    DurationOrZero,
    EngineSampling,
    LearningSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    SamplingSettings,
    Settings,
    VllmSettings,
)
from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.job.keep_alive import KeepAlive
from rlhfless_operator.job.outputs import ArtifactsSpec, CheckpointsSpec, TrackingSpec
from rlhfless_operator.job.paths import resolve_chat_template, resolve_file, resolve_model
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.prices import BudgetSpec, PricesSpec, instance_gpus, instance_prices
from rlhfless_operator.job.rehearsal import RehearsalSpec
from rlhfless_operator.job.rules import SPEC_RULES, Violation

API_VERSION = "rlhfless.io/v1alpha1"
KIND = "RLHFJob"


class InstanceRange(Settings):
    """How many generation instances a step may use."""

    min: int = Field(default=1, ge=1)
    """Fewest instances of a step."""
    max: int | None = Field(default=None, ge=1)
    """Most instances of a step. If left out, as many as there are GPUs for: with `rlhfless run` those of the machine,
    on a cluster those of the job's pool and, beside the other stages, of its namespace's quota. One where none of these
    tells, as on a machine without GPUs, whose cores one instance uses best."""


class GenerationSpec(Settings):
    """The instances that generate."""

    instances: InstanceRange = InstanceRange()
    """How many instances a step may use; the planning policy chooses in this range."""
    keep_alive: KeepAlive = None
    """How long an instance without work is kept; `auto` weighs waiting against starting anew."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """What generates; `auto` is vLLM where it is installed and the device can, and transformers elsewhere."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM, where it generates."""
    kv_budget_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in an instance's KV cache at a time; from its free memory if left out."""
    share_prefixes: bool = False
    """Compute beginnings that prompts of several instances have in common once, and send their keys and values, where
    vLLM generates, instances share a file system and sending takes less time than computing."""
    drafting: Literal["auto", "never"] = "never"
    """`auto` guesses several tokens of a response at a time from earlier responses, and keeps those that would have
    been sampled anyway; `never` samples a token at a time. The samples are the same. It is not yet known where `auto`
    is faster."""
    flush: Duration = 5.0
    """Longest time that generated tokens are kept in an instance alone: what a lost instance costs at most."""
    pods: PodsSpec = PodsSpec()
    """Pods of generation on a cluster; `rlhfless run` ignores them."""


class PreparationSpec(Settings):
    """The instance that prepares: rewards, reference log-probabilities, values and advantages."""

    keep_alive: KeepAlive = None
    """How long the instance without work is kept; `auto` weighs waiting against starting anew."""
    pods: PodsSpec = PodsSpec()
    """Pods of preparation on a cluster; `rlhfless run` ignores them, but for a GPU that they ask for."""


Overlap = Literal["never", "auto", "ordered"]


class LearnerRange(Settings):
    """How many instances may take a learning step together. Each has `processes`, and a part of the weights, the
    gradients and the optimizer's state."""

    min: int = Field(default=1, ge=1, le=64)
    """Fewest instances of a step: with fewer it is not taken."""
    max: int = Field(default=1, ge=1, le=64)
    """Most instances of a step. It is taken with fewer where one is lost or does not come, and the most are asked for
    again after the next checkpoint. With `planning.policy: cost` and a smaller `min`, the plan chooses how many, from
    what steps with different numbers have taken. Another number changes the weights by about 1e-6 a step. It is 1 in a
    rehearsal, and where pods use GPUs in turns (`deviceClass`)."""


class LearningSpec(LearningSettings):
    """The instances that learn."""

    instances: LearnerRange = LearnerRange()
    """How many instances may take a step together."""
    gang_timeout: Duration = 120.0
    """Longest time that instances which learn together hold their GPUs while others of them are missing; then the step
    is taken with those that are there."""

    overlap: Overlap = "never"
    """`auto` and `ordered` let the `cost` planning policy begin to learn from groups that are prepared while others are
    still generated, where a step is one optimizer update and no advantage needs the whole batch; with dynamic sampling
    they are refused. `auto` learns from groups as they arrive, and writes down in what order: the last bits of the
    weights depend on that order, and whoever takes the step again follows it. `ordered` learns from them in the order
    of their predicted lengths: the bits depend on nothing that happens, and the learner waits longer."""
    keep_alive: KeepAlive = None
    """How long the instance without work, which holds the optimizer's state in memory, is kept; `auto` weighs waiting
    against starting anew, loading the checkpoint and taking the steps since then again."""
    pods: PodsSpec = PodsSpec()
    """Pods of learning on a cluster; `rlhfless run` ignores them."""


class MigrationSpec(Settings):
    """When unfinished samples move to another actor, so that emptied instances are released. What is learnt stays the
    same."""

    policy: Literal["none", "threshold", "global", "repack", "benefit"] = "benefit"
    """`benefit` moves where that saves more than it costs; `threshold` empties an actor that has finished `ratio` of
    its samples (RLHFless); `global` gathers the rest once `ratio` of all samples is finished (RLHFuse); `repack`
    empties actors that are past their peak (Laminar); `none` never moves."""
    ratio: float | None = Field(default=None, ge=0, le=1)
    """Share τ of finished samples at which `threshold` and `global` act; 0.95 and 0.9 if left out."""
    slots: int = Field(default=256, ge=1)
    """Most unfinished samples that moves may gather on one actor."""
    period: Duration = 1.0
    """Least time between two decisions of `repack` and `benefit`."""
    hysteresis: float = Field(default=0.25, ge=0)
    """By which part of its cost the saving of a move must exceed it, in `benefit`."""
    moves_per_sample: int = Field(default=2, ge=0)
    """How often a sample may be moved by choice."""


class PlanningSpec(Settings):
    """How a step's samples are divided over instances."""

    policy: Literal["single", "even", "cost"] = "cost"
    """One instance; all instances with the prompts split evenly; or what the predicted lengths make cheapest."""
    cost_weight: float = Field(default=0.5, ge=0, le=1, alias="lambda")
    """Weight λ of cost against time in the `cost` policy: 0 minimises a step's time, 1 its cost."""
    migration: MigrationSpec = MigrationSpec()
    """When unfinished samples move to another actor."""


class EvaluationSamplingSpec(Settings):
    """What an evaluation samples in another way than training does."""

    temperature: float | None = Field(default=None, ge=0)
    """Divides the logits; 0 takes the likeliest token each time (greedy). That of training if left out."""


class EvaluationSpec(Settings):
    """Mean reward on prompts that are not trained on, before the first step, after the last, and in between."""

    data: DataSettings
    """The prompts to evaluate on."""
    every_steps: int | None = Field(default=None, ge=1)
    """Steps from one evaluation to the next; only before the first and after the last step if left out."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Responses sampled for each prompt."""
    rewards: list[RewardSettings] | None = Field(default=None, min_length=1, max_length=32)
    """Reward terms of the evaluation, whose weighted sum is its accuracy; those of training if left out."""
    sampling: EvaluationSamplingSpec = EvaluationSamplingSpec()
    """How its responses are sampled, where not as in training."""


class LimitsSpec(Settings):
    """When work is given to another instance, and when the job gives up."""

    retries: int = Field(default=3, ge=0)
    """How often one part of the work is tried again after its instance was lost or failed in a retryable way."""
    stall: Duration = 120.0
    """A stream that is silent for longer than this is abandoned, and its work given to another instance."""
    unscorable: float = Field(default=0.5, ge=0, le=1)
    """Share of the samples of a step, or of an evaluation, that may stay without a reward; with more the job fails."""
    dropped_prompts: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a dataset's rows that may be left out, as too long, empty or answered; more is an error."""


class RLHFJobSpec(Settings):
    """What to train, on what, how, and within which bounds."""

    model: ModelSettings
    """The model to train."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """The algorithm and its numbers."""
    rewards: list[RewardSettings] = Field(min_length=1, max_length=32)
    """Reward terms; a sample's reward is the weighted sum of those that scored it (a None is left out)."""
    data: DataSettings
    """The prompts to train on."""
    sampling: SamplingSettings = SamplingSettings()
    """How responses are sampled."""
    batch: BatchSettings = BatchSettings()
    """Size of a step and how it is cut up for learning."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The policy's optimizer and schedule."""
    steps: int | None = Field(default=None, ge=1)
    """Training steps of the job; either this or `epochs`."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training prompts; either this or `steps`."""
    seed: int = Field(default=0, ge=0, le=2**53 - 1)
    """Seed of everything random: the order of prompts and every sample's tokens."""
    asynchronous: AsyncSpec | None = Field(default=None, alias="async")
    """Generate ahead of the learner; each step waits for the one before if left out."""
    generation: GenerationSpec = GenerationSpec()
    """The instances that generate."""
    preparation: PreparationSpec = PreparationSpec()
    """The instance that prepares."""
    learning: LearningSpec = LearningSpec()
    """The instance that learns."""
    planning: PlanningSpec = PlanningSpec()
    """How a step's samples are divided over instances."""
    prices: PricesSpec = PricesSpec()
    """What instances cost."""
    budget: BudgetSpec | None = None
    """What the job may spend; no limit if left out. It may be changed at any time, also while the job runs."""
    evaluation: EvaluationSpec | None = None
    """Evaluation on prompts that are not trained on; none if left out."""
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    """When checkpoints are written and how many are kept."""
    artifacts: ArtifactsSpec = ArtifactsSpec()
    """Where everything that the job makes is kept."""
    tracking: TrackingSpec = TrackingSpec()
    """Where metrics go."""
    limits: LimitsSpec = LimitsSpec()
    """When work is given to another instance, and when the job gives up."""
    rehearsal: RehearsalSpec | None = None
    """Rehearse the job's scheduling on emulated GPUs before paying for real ones. Nothing is trained."""
    pool: str | None = Field(default=None, min_length=1)
    """Pool of GPUs that the job shares with others on a cluster, one of those that the operator was installed with;
    the pool `default` if left out. `rlhfless run` ignores it."""
    priority: int = Field(default=0, ge=-1000000, le=1000000)
    """Which of the jobs that share a pool or wait in a queue of Kueue comes first: the higher. Work that has begun is
    never interrupted in a pool. `rlhfless run` ignores it."""
    pods: PodsSpec = PodsSpec()
    """Pods of every stage on a cluster; `rlhfless run` ignores them."""
    suspend: bool = False
    """Let go of every instance and keep the work; set it back to false to go on. `rlhfless run` ignores it."""
    backoff_limit: int = Field(default=6, ge=0)
    """Restarts in a row, without a finished step in between, after internal failures; then the job has failed. Lost and
    preempted instances do not count. `rlhfless run` ignores it."""
    active_deadline: Duration | None = None
    """Longest time that the job may take, then it has failed: finished steps and the one under way count, being
    suspended or waiting for a driver does not. No limit if left out."""
    ttl_after_finished: DurationOrZero | None = None
    """Time after its end at which the resource is deleted; its folder stays. Never if left out. `rlhfless run` ignores
    it."""

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        violations = [
            Violation(rule.field, rule.reads, message)
            for rule in SPEC_RULES
            if (message := rule.check(self)) is not None
        ]
        if violations:
            text = "; ".join(f"{violation.field}: {violation.message}" for violation in violations)
            raise PydanticCustomError("rules", "{text}", {"text": text, "violations": violations})
        return self

    @property
    def evaluation_rewards(self) -> list[RewardSettings]:
        """What an evaluation scores with."""
        own = self.evaluation.rewards if self.evaluation is not None else None
        return self.rewards if own is None else own

    @property
    def all_rewards(self) -> list[RewardSettings]:
        """The rewards of training, and those that the evaluation has of its own; two may have one name."""
        return self.rewards + [reward for reward in self.evaluation_rewards if reward not in self.rewards]

    @property
    def evaluation_sampling(self) -> EngineSampling:
        """How an evaluation's responses are sampled."""
        own = self.evaluation.sampling.temperature if self.evaluation is not None else None
        given = self.sampling.model_dump()
        return EngineSampling(**given) if own is None else EngineSampling(**{**given, "temperature": own})

    @property
    def chooses_learners(self) -> bool:
        """Whether the plan of a step chooses how many instances learn together."""
        return self.learning.instances.min < self.learning.instances.max and self.planning.policy == "cost"

    @property
    def instance_prices(self) -> dict[Stage, Decimal]:
        """Price of an instance of each stage for an hour, in the currency of the prices."""
        return instance_prices(self)

    @property
    def instance_gpus(self) -> dict[Stage, int]:
        """GPUs of an instance of each stage, as the document has it."""
        return instance_gpus(self)

    def keep_alive_seconds(self) -> dict[Stage, float]:
        """How long the job has each stage's instances kept without work; 0 where that is weighed anew each time."""
        return {
            "generation": self.generation.keep_alive or 0.0,
            "preparation": self.preparation.keep_alive or 0.0,
            "learning": self.learning.keep_alive or 0.0,
        }


class JobMetadata(Settings):
    """The job's name, and what Kubernetes keeps with it."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=53)
    """Name of the job and of its folder: lower-case letters, digits and hyphens, at most 53 characters."""
    namespace: str | None = None
    """Namespace of the resource; `rlhfless run` ignores it."""
    labels: dict[str, str] | None = None
    """Labels of the resource; `rlhfless run` ignores them."""
    annotations: dict[str, str] | None = None
    """Annotations of the resource; `rlhfless run` ignores them."""


class RLHFJob(Settings):
    """One training run. The same document goes to `rlhfless run` and to `kubectl apply`."""

    api_version: Literal["rlhfless.io/v1alpha1"]
    """Version of this document's format."""
    kind: Literal["RLHFJob"]
    """Kind of this document."""
    metadata: JobMetadata
    """The job's name."""
    spec: RLHFJobSpec
    """What to train, on what, how, and within which bounds."""

    def resolve_paths(self, base: Path) -> Self:
        """The same job with its relative local paths made absolute.

        Args:
            base: folder of the job file. `artifacts.uri` is left alone: it belongs to the working directory.
        """
        spec = self.spec
        model = spec.model.model_copy(
            update={
                "source": resolve_model(spec.model.source, base),
                "tokenizer": spec.model.tokenizer and resolve_model(spec.model.tokenizer, base),
                "chat_template": spec.model.chat_template and resolve_chat_template(spec.model.chat_template, base),
            }
        )
        evaluation = spec.evaluation and spec.evaluation.model_copy(
            update={
                "data": _resolve_data(spec.evaluation.data, base),
                "rewards": spec.evaluation.rewards
                and [_resolve_reward(reward, base) for reward in spec.evaluation.rewards],
            }
        )
        update = {
            "model": model,
            "data": _resolve_data(spec.data, base),
            "rewards": [_resolve_reward(reward, base) for reward in spec.rewards],
            "evaluation": evaluation,
            "rehearsal": spec.rehearsal and spec.rehearsal.resolve_paths(base),
        }
        return self.model_copy(update={"spec": spec.model_copy(update=update)})


def _resolve_data(data: DataSettings, base: Path) -> DataSettings:
    return data.model_copy(update={"source": resolve_file(data.source, base)})


def _resolve_reward(reward: RewardSettings, base: Path) -> RewardSettings:
    if reward.python is not None:
        python = reward.python.model_copy(update={"file": resolve_file(reward.python.file, base)})
        return reward.model_copy(update={"python": python})
    if reward.model is not None:
        model = reward.model.model_copy(update={"source": resolve_model(reward.model.source, base)})
        return reward.model_copy(update={"model": model})
    return reward
