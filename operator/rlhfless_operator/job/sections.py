"""The sections of a job document and their fields."""

from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from rlhfless_functions.api import Stage
from rlhfless_functions.settings import (
    EXPERIMENTAL,
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    Duration,
    DurationOrZero,
    EngineSampling,
    EnvironmentSettings,
    LearningSettings,
    ModelSettings,
    OpenEnvEnvironment,
    OptimizerSettings,
    RewardSettings,
    SamplingSettings,
    Settings,
    VllmSettings,
)
from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.job.instance_ranges import InstanceRange, LearnerRange, PreparerRange
from rlhfless_operator.job.keep_alive import KeepAlive
from rlhfless_operator.job.outputs import ArtifactsSpec, CheckpointsSpec, TrackingSpec
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.prices import BudgetSpec, PricesSpec
from rlhfless_operator.job.rehearsal import RehearsalSpec


class GenerationSpec(Settings):
    """The instances that generate."""

    instances: InstanceRange = InstanceRange()
    """Number of instances that a step may use. The planning policy chooses within this range."""
    keep_alive: KeepAlive = None
    """How long an idle instance is kept. `auto` weighs the cost of waiting against that of a new start. If all stages
    say `auto`, the `cost` planning policy keeps all instances for whole steps where it finds that better."""
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    """Inference engine. `auto` selects vLLM if it is installed and supports the device, and transformers otherwise."""
    vllm: VllmSettings = VllmSettings()
    """Settings of vLLM, for instances that generate with it."""
    kv_budget_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in an instance's KV cache at a time; by default as many as its free memory holds."""
    share_prefixes: Literal["auto", "always", "never"] = "auto"
    """Compute a prefix that prompts of several instances share only once, and send its keys and values. `auto` does so
    in steps that it makes shorter, by what earlier steps measured. `always` does so even if that takes longer. Only
    vLLM shares prefixes."""
    drafting: Annotated[Literal["auto", "never"], EXPERIMENTAL] = "never"
    """`auto` drafts several tokens at a time from earlier responses, and keeps those that would have been sampled
    anyway. `never` samples one token at a time. The samples are the same. `auto` is experimental: when it is faster
    has not been measured yet."""
    weight_relays: Annotated[Literal["never", "auto"], EXPERIMENTAL] = "never"
    """Fetch new weights from another instance instead of the store where artifacts are in an object store: in a chain
    of the instances that the last step left, and in a line of new ones. docs/weights.md says when that helps. It is
    experimental: how much time it saves on a cluster has not been measured."""
    flush: Duration = 5.0
    """Longest time that generated tokens stay in an instance's memory only, and so the most work that a lost instance
    costs."""
    pods: PodsSpec = PodsSpec()
    """Pods of generation on a cluster; `rlhfless run` ignores them."""


class PreparationSpec(Settings):
    """The instances that prepare: rewards, reference log-probabilities, values and advantages."""

    instances: PreparerRange = PreparerRange()
    """Number of instances that may prepare a step's groups at the same time."""
    keep_alive: KeepAlive = None
    """How long an idle instance is kept. `auto` weighs the cost of waiting against that of a new start."""
    pods: PodsSpec = PodsSpec()
    """Pods of preparation on a cluster; `rlhfless run` ignores them, except for the GPUs that they request."""


class LearningSpec(LearningSettings):
    """The instances that learn."""

    instances: LearnerRange = LearnerRange()
    """Number of instances that may take a step together."""
    gang_timeout: Duration = 120.0
    """Longest time that instances of a step hold their GPUs while other instances of it are missing. After that, the
    step runs with those that have started."""

    overlap: Literal["never", "auto"] = "auto"
    """Whether to learn from prepared groups while others of a step are still generated. `auto` does so in asynchronous
    jobs, and with the `cost` planning policy if there are GPUs for it beside generation. A step has to be one optimizer
    update, no advantage may need the whole batch, and the job has neither dynamic sampling nor `async` with a critic.
    It learns from groups in the order of their arrival and records this order, because the last bits of the weights
    depend on it; a repeated step and `rlhfless replay` follow the record. With `never` the bits of a synchronous job
    depend on no timing."""
    keep_alive: KeepAlive = None
    """How long the idle instance is kept, which holds the optimizer's state in memory. `auto` weighs the cost of
    waiting against that of a new start, loading the checkpoint and repeating the steps since then."""
    pods: PodsSpec = PodsSpec()
    """Pods of learning on a cluster; `rlhfless run` ignores them."""


class EnvironmentSpec(EnvironmentSettings):
    """Where the model acts in several turns: an environment, tools, or both."""

    pods: PodsSpec = PodsSpec()
    """Pods of the server of `openenv` or `served`, on a cluster where the job runs it. They have the image that is
    named there, and no GPUs. Of the job's other pods they have nothing, and of the cluster's defaults only where pods
    run: no volumes, no variables, and no Secrets but those for pulling images. `rlhfless run` ignores them."""


class MigrationSpec(Settings):
    """When to move unfinished samples to another actor and release the emptied instance. Moves do not change what is
    learnt."""

    policy: Literal["none", "threshold", "repack", "benefit"] = "benefit"
    """`benefit` moves samples if that saves more than it costs; `threshold` empties an actor that has finished `ratio`
    of its samples (RLHFless); `repack` empties actors that are past their peak (Laminar); `none` never moves."""
    ratio: float = Field(default=0.95, ge=0, le=1)
    """Share τ of finished samples at which `threshold` acts."""
    slots: int = Field(default=256, ge=1)
    """Most unfinished samples that moves may gather on one actor."""
    period: Duration = 1.0
    """Least time between two decisions of `repack` and `benefit`."""
    hysteresis: float = Field(default=0.25, ge=0)
    """For `benefit`: the share of its cost by which a move's saving must exceed the cost."""
    moves_per_sample: int = Field(default=2, ge=0)
    """Most times that the driver may choose to move a sample."""


class PlanningSpec(Settings):
    """Division of a step's samples among instances."""

    policy: Literal["even", "cost"] = "cost"
    """`even` splits the prompts evenly over all instances, and `cost` chooses the cheapest plan for the predicted
    lengths."""
    cost_weight: float = Field(default=0.5, ge=0, le=1, alias="lambda")
    """Weight λ of cost against time in the `cost` policy: 0 minimises a step's time, 1 its cost."""
    migration: MigrationSpec = MigrationSpec()
    """When unfinished samples move to another actor."""


class EvaluationSamplingSpec(Settings):
    """Sampling settings of evaluations that differ from those of training."""

    temperature: float | None = Field(default=None, ge=0)
    """Divides the logits; 0 always takes the likeliest token (greedy). By default the temperature of training."""


class EvaluationSpec(Settings):
    """Mean reward on held-out prompts, before the first step, after the last, and in between."""

    data: DataSettings
    """The prompts to evaluate on."""
    every_steps: int | None = Field(default=None, ge=1)
    """Steps between evaluations; by default they run only before the first and after the last step."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Number of responses to each prompt."""
    rewards: list[RewardSettings] | None = Field(default=None, min_length=1, max_length=32)
    """Reward terms of the evaluation, whose weighted sum is the held-out reward; by default those of training."""
    sampling: EvaluationSamplingSpec = EvaluationSamplingSpec()
    """Sampling settings that differ from those of training."""


class LimitsSpec(Settings):
    """When work moves to another instance after failures, and when the job gives up."""

    retries: int = Field(default=3, ge=0)
    """Most retries of one part of the work after its instance was lost or failed in a retryable way."""
    stall: Duration = 120.0
    """Longest silence of a stream, and longest time in which nothing works in an instance: neither its task nor a
    process below it uses any CPU time. After it, another instance does the work. A reward has its own `timeout`, and
    learning instances may wait for each other as long as one of them works."""
    unscorable: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a step's or an evaluation's samples that may have no reward; above it the job fails."""
    dropped_prompts: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a dataset's rows that may be dropped as too long, empty or already answered; above it the job
    fails."""
    mismatch: float | None = Field(default=None, gt=1)
    """Largest mean of exp|difference| between the engine's log-probabilities of a step's tokens and the learner's, with
    the same weights (`mismatch/mean_exp_abs`); above it the job fails. By default 1.2 in float32, 2 in bfloat16, and 5
    if vLLM quantizes; with an adapter's dropout there is no default."""


class JobFields(Settings):
    """All fields of a job, without the rules that bind them together (spec.py)."""

    model: ModelSettings
    """The model to train."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """The algorithm and its hyperparameters."""
    rewards: list[RewardSettings] = Field(min_length=1, max_length=32)
    """Reward terms. A sample's reward is the weighted sum of the terms that scored it; a term that returns None does
    not count."""
    data: DataSettings
    """The prompts to train on."""
    environment: EnvironmentSpec | None = None
    """What the model acts in, in several turns; by default a response is a single turn."""
    sampling: SamplingSettings = SamplingSettings()
    """Sampling of responses."""
    batch: BatchSettings = BatchSettings()
    """Size of a step, and how it is divided for learning."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The policy's optimizer and schedule."""
    steps: int | None = Field(default=None, ge=1)
    """Training steps of the job; set either this or `epochs`."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training prompts; set either this or `steps`. Prompts that
    dynamic sampling draws in place of others count: once they are used up, the job ends, in fewer steps than the
    optimizer's schedule was planned for."""
    seed: int = Field(default=0, ge=0, le=2**53 - 1)
    """Seed of everything random: the order of prompts and every sample's tokens."""
    asynchronous: Annotated[AsyncSpec | None, EXPERIMENTAL] = Field(default=None, alias="async")
    """Generate ahead of the learner; by default each step waits for the one before. It is experimental: nothing has
    been measured on GPUs."""
    generation: GenerationSpec = GenerationSpec()
    """The instances that generate."""
    preparation: PreparationSpec = PreparationSpec()
    """The instances that prepare."""
    learning: LearningSpec = LearningSpec()
    """The instance that learns."""
    planning: PlanningSpec = PlanningSpec()
    """Division of a step's samples among instances."""
    prices: PricesSpec = PricesSpec()
    """Prices of instances."""
    budget: BudgetSpec | None = None
    """Most that the job may spend; by default there is no limit. You may change it at any time, even while it runs."""
    evaluation: EvaluationSpec | None = None
    """Evaluation on held-out prompts; by default there is none."""
    checkpoints: CheckpointsSpec = CheckpointsSpec()
    """When checkpoints are written and how many are kept."""
    artifacts: ArtifactsSpec = ArtifactsSpec()
    """Place of the job's outputs."""
    tracking: TrackingSpec = TrackingSpec()
    """Destinations of metrics."""
    limits: LimitsSpec = LimitsSpec()
    """When work is given to another instance, and when the job gives up."""
    rehearsal: RehearsalSpec | None = None
    """Rehearse the job's scheduling on emulated GPUs before paying for real ones. Nothing is trained."""
    pool: str | None = Field(default=None, min_length=1)
    """GPU pool on a cluster that the job shares with others; one of those configured at the operator's installation. By
    default the pool `default`. `rlhfless run` ignores it."""
    priority: int = Field(default=0, ge=-1000000, le=1000000)
    """Priority among jobs that share a pool or wait in a Kueue queue; higher goes first. In a pool, running work is
    never interrupted. `rlhfless run` ignores it."""
    pods: PodsSpec = PodsSpec()
    """Pods of every stage on a cluster; `rlhfless run` ignores them."""
    suspend: bool = False
    """Release every instance and keep the work; set it back to false to continue. `rlhfless run` ignores it."""
    backoff_limit: int = Field(default=6, ge=0)
    """Most consecutive restarts after internal failures without a finished step in between; after that the job fails.
    Lost and preempted instances do not count. `rlhfless run` ignores it."""
    active_deadline: Duration | None = None
    """Longest run time of the job, after which it fails. Finished steps and the current one count; time suspended or
    waiting for a driver does not. By default there is no limit."""
    ttl_after_finished: DurationOrZero | None = None
    """Time from the job's end until the resource is deleted; by default never. The job's folder stays. `rlhfless run`
    ignores it."""

    @property
    def evaluation_rewards(self) -> list[RewardSettings]:
        """The reward terms of an evaluation."""
        own = self.evaluation.rewards if self.evaluation is not None else None
        return self.rewards if own is None else own

    @property
    def all_rewards(self) -> list[RewardSettings]:
        """The rewards of training and the evaluation's own; the two may share names."""
        return self.rewards + [reward for reward in self.evaluation_rewards if reward not in self.rewards]

    _default_pods: PodsSpec = PrivateAttr(default_factory=PodsSpec)

    @property
    def default_pods(self) -> PodsSpec:
        """Defaults of the pods on the cluster where the job runs. They are not a part of its document."""
        return self._default_pods

    def with_default_pods(self, pods: PodsSpec) -> Self:
        """Return a copy with these default pods."""
        copy = self.model_copy()
        copy._default_pods = pods
        return copy

    @property
    def evaluation_sampling(self) -> EngineSampling:
        """Sampling settings of an evaluation."""
        own = self.evaluation.sampling.temperature if self.evaluation is not None else None
        given = self.sampling.model_dump()
        return EngineSampling(**given) if own is None else EngineSampling(**{**given, "temperature": own})

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one training step."""
        samples = self.batch.prompts_per_step * self.batch.samples_per_prompt
        return samples // (self.batch.minibatch_samples or samples) * self.algorithm.epochs

    @property
    def may_learn_in_pieces(self) -> bool:
        """Whether the job lets a learner begin before a step's batch is complete, and needs the whole batch for
        nothing."""
        algorithm = self.algorithm.resolved()
        whole = self.updates_per_step > 1 or algorithm.normalizes_batch or bool(algorithm.dynamic_sampling_rounds)
        # In an asynchronous job the learner makes the values of a whole batch with its own critic.
        whole = whole or (self.asynchronous is not None and algorithm.advantage == "gae")
        begins = self.planning.policy == "cost" or self.asynchronous is not None
        return self.learning.overlap == "auto" and begins and not whole

    @property
    def may_let_actors_go(self) -> bool:
        """Whether actors may be let go while environments work. Those of an asynchronous job have other rollouts."""
        return self.environment is not None and self.environment.let_go == "auto" and self.asynchronous is None

    @property
    def has_environment_pods(self) -> bool:
        """Whether the job may have pods of an environment on a cluster: servers, or the one that keeps episodes."""
        return self.may_let_actors_go or self.environment_server is not None

    @property
    def environment_server(self) -> OpenEnvEnvironment | None:
        """The server of environments that the job runs; None if it runs none. A rehearsal emulates them."""
        return None if self.environment is None or self.rehearsal is not None else self.environment.server

    @property
    def asked_environment(self) -> EnvironmentSettings | None:
        """The environment as instances have it. In a rehearsal nobody asks a server at its address."""
        given = self.environment
        return given if given is None or given.server == self.environment_server else given.at("http://emulated")

    @property
    def chooses_learners(self) -> bool:
        """Whether a step's plan chooses how many instances learn together."""
        return self.learning.instances.min < self.learning.instances.max and self.planning.policy == "cost"

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether responses that go on with newer weights keep the keys and values of older ones."""
        return self.asynchronous is not None and self.asynchronous.kv_cache == "keep"

    def keep_alive_seconds(self) -> dict[Stage, float]:
        """Return the seconds for which idle instances of each stage are kept; 0 with `auto`."""
        return {
            "generation": self.generation.keep_alive or 0.0,
            "preparation": self.preparation.keep_alive or 0.0,
            "learning": self.learning.keep_alive or 0.0,
        }
