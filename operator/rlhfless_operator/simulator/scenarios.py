"""The scenarios: hardware, model, workload, and assumptions for numbers that are not published."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhfless_operator.planner.latency.drafting import DraftedLatency, Drafts
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.planner.latency.roofline import (
    H100,
    L40S,
    LLAMA_70B,
    QWEN_3B,
    QWEN_7B,
    Gpu,
    ModelShape,
    kv_tokens,
    roofline,
)
from rlhfless_operator.simulator.traces import LengthStatistics, Trace, generate

NODE_GPUS = 8
"""Most GPUs of a node, and so of an instance."""
STORE_RATE = 0.85e9
"""Bytes of new weights per second that one GPU of our learner publishes through the store. Measured for 1 GB in a
folder, with one core: `benchmarks/weights/results/publishing_rate.json`."""


def store_seconds(weight_bytes: float, learner_gpus: int, rate: float = STORE_RATE) -> float:
    """Return the seconds in which a learner publishes new weights through the store. Each of its GPUs writes its part;
    up to those of a node are assumed to add up."""
    return weight_bytes / (rate * min(learner_gpus, NODE_GPUS))


@dataclass(frozen=True)
class Scenario:
    """One setting. Numbers without a published source are marked, and swept in docs/research/simulation.md."""

    name: str
    model: ModelShape
    gpu: Gpu
    gpus: int
    """GPUs of the cluster."""
    gpus_per_instance: int
    algorithm: Literal["grpo", "ppo"]
    lengths: LengthStatistics
    prompts_per_step: int
    samples_per_prompt: int
    steps_per_epoch: int
    epochs: int
    gpu_hour: float
    """Price of a GPU for an hour, dollars."""
    max_batch: int = 256
    """Most sequences in a decode step: the engine's usual limit."""
    startup_seconds: float = 0.5
    """Time until an instance of generation that slept is awake. It dropped its weights, as its next task brings others.
    `PLATFORMS` says where the figure is from."""
    weight_load_seconds: float = 3.0
    """Time to take the new weights (published: 3.5 s by broadcast). All policies pay it, static actors too."""
    trainer_start_seconds: float = 1.0
    """Time to wake the learner, its state included; see `PLATFORMS`. Static actors do not pay it. What ships takes the
    time that its state takes (`OwnStages`)."""
    update_seconds: float = 0.5
    """Time of the optimizer's step and of the publication of the weights."""
    publishing_seconds: float = 0.25
    """Part of `update_seconds` in which the weights are on their way. Our asynchronous learner goes on meanwhile.
    Assumed."""
    sleeps: bool = True
    """Whether our instances sleep on slots between their tasks: each task of theirs then begins with a wake, which no
    forecast hides. If not, whole pods start ahead of their work."""
    store_rate: float = STORE_RATE
    """See `STORE_RATE`."""
    training_utilisation: float = 0.35
    """Part of the peak arithmetic that learning reaches. Assumed."""
    preparation_utilisation: float = 0.5
    """Part of the peak arithmetic that preparation's forward passes reach. Assumed."""
    cost_weight: float = 0.5
    failures_per_hour: float = 0.0
    """Instances lost per instance-hour."""
    drafts: Drafts | None = None
    """Quality of drafts from the second epoch on; None if nothing is drafted. In the first epoch there is nothing to
    draft from."""

    def __post_init__(self) -> None:
        if not 0 <= self.cost_weight <= 1:
            raise ValueError(
                f"cost_weight is {self.cost_weight}: λ is between 0 and 1;"
                f" the nearest is {min(1, max(0, self.cost_weight))}"
            )
        if self.gpus < self.gpus_per_instance:
            raise ValueError(f"gpus is {self.gpus}: one instance needs {self.gpus_per_instance}")
        for name in ("prompts_per_step", "samples_per_prompt", "steps_per_epoch", "epochs", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it is at least 1")
        for name in ("startup_seconds", "weight_load_seconds", "trainer_start_seconds", "failures_per_hour"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it is 0 or more")

    @property
    def instances(self) -> int:
        """Largest number of instances at a time."""
        return self.gpus // self.gpus_per_instance

    def draw_trace(self, seed: int) -> Trace:
        """Draw the lengths of all responses of a run."""
        return generate(
            self.lengths,
            epochs=self.epochs,
            prompts=self.prompts_per_step * self.steps_per_epoch,
            samples=self.samples_per_prompt,
            seed=seed,
        )

    def profile(self, *, drafts: bool = True) -> InstanceProfile:
        """Return the profile of an instance, with or without the scenario's drafts."""
        measured = MEASURED.get((self.gpu.name, self.model.name, self.gpus_per_instance))
        table = measured or roofline(self.model, self.gpu, self.gpus_per_instance)
        linear = table.linear()
        return InstanceProfile(
            DraftedLatency(linear, self.drafts) if drafts and self.drafts is not None else linear,
            self.gpus_per_instance,
            kv_tokens(self.model, self.gpu, self.gpus_per_instance),
            self.startup_seconds,
            self.weight_load_seconds,
        )

    def store_seconds(self, learner_gpus: int) -> float:
        """Return the seconds in which our learner publishes new weights; see `store_seconds`."""
        return store_seconds(self.model.weight_bytes, learner_gpus, self.store_rate)

    @property
    def preparer_start_seconds(self) -> float:
        """Seconds until an instance of preparation that starts or wakes works: it loads the models that it asks."""
        return self.startup_seconds + self._asked_models * self.weight_load_seconds

    @property
    def _asked_models(self) -> int:
        """Models that preparation asks: the reference policy, and PPO's critic."""
        return 2 if self.algorithm == "ppo" else 1

    def preparation_gpu_seconds(self, tokens: float) -> float:
        """Return the GPU-seconds of forward passes of the reference policy, and of PPO's critic.

        A step is one update, so the ratios are 1 and the old policy is not needed.
        """
        return self._asked_models * 2 * self.model.parameters * tokens / (self.gpu.flops * self.preparation_utilisation)

    def learning_gpu_seconds(self, tokens: float) -> float:
        """Return the GPU-seconds of forward and backward passes of the policy, and of PPO's critic."""
        models = 2 if self.algorithm == "ppo" else 1
        return models * 6 * self.model.parameters * tokens / (self.gpu.flops * self.training_utilisation)


# The mean response of Qwen2.5 on GSM8K is about 300 tokens; GPQA's and LiveCodeBench's are longer and reach the
# paper's cap of 2,048 more often. Shares of runaways are from the published 1 to 5 %.
_GSM8K = LengthStatistics(median=225, longest=2048, prompt_median=120, runaways=0.01)
_GPQA = LengthStatistics(median=500, longest=2048, prompt_median=250, runaways=0.03)
_LIVECODEBENCH = LengthStatistics(median=600, longest=2048, prompt_median=500, runaways=0.05)


@dataclass(frozen=True)
class Platform:
    """The times in which instances of ours start."""

    startup_seconds: float
    """Seconds to start a generation instance, or to wake one that sleeps."""
    trainer_start_seconds: float
    """The same of the learner, without its state if it does not sleep."""
    sleeps: bool


PLATFORMS = {
    # Published: 0.1 to 6 s. Measured with a model of 126 MB on a CPU: 0.3 s.
    # A GPU changes hands in 0.32 s (p95, real pods on a CPU: e2e/test_hand_over.py), and vLLM wakes without weights in
    # 0.09 s (a log in vllm-project/vllm issue 29341). The state of a 3B model's learner is on eight L40S in 0.2 s at
    # 80 % of the bus, and on four in 0.4 s. A GPU has measured 52 GB/s: benchmarks/gpu/results/h200.json.
    "slots": Platform(0.5, 1.0, sleeps=True),
    # A full start of vLLM in a fresh pod is published as 30 to 135 s.
    "pods": Platform(30.0, 30.0, sleeps=False),
    # Processes are forked from a server that has imported everything; the engine starts anew.
    "processes": Platform(5.0, 5.0, sleeps=False),
}
"""Platforms by name; the first is the default: slots on a GPU machine, or on a cluster with a `deviceClass`."""

GPU_HOUR = {"L40S": 30.131 / 8, "H100": 55.04 / 8, "H200": 63.296 / 8}
"""Dollars for an hour: AWS on demand, an eighth of g6e.48xlarge, p5.48xlarge and p5en.48xlarge."""

# The paper's batch is not published: assumed are 256 prompts of 8 samples (GRPO) and 1,024 prompts of one (PPO). The
# docs sweep it.
_BATCHES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "prompts_per_step": 256, "samples_per_prompt": 8},
    "ppo": {"algorithm": "ppo", "prompts_per_step": 1024, "samples_per_prompt": 1},
}


def _paper() -> list[Scenario]:
    """Return the paper's settings: each model on each task with each algorithm."""
    return [
        Scenario(
            name=f"paper-{size}-{task}-{algorithm}",
            model=model,
            gpu=L40S,
            gpus=16,
            gpus_per_instance=1,
            lengths=lengths,
            steps_per_epoch=3,
            epochs=3,
            gpu_hour=GPU_HOUR["L40S"],
            **batch,
        )
        for model, size in ((QWEN_3B, "3b"), (QWEN_7B, "7b"))
        for lengths, task in ((_GSM8K, "gsm8k"), (_GPQA, "gpqa"), (_LIVECODEBENCH, "livecodebench"))
        for algorithm, batch in _BATCHES.items()
    ]


_LARGE = Scenario(
    name="h100-160-70b",
    model=LLAMA_70B,
    gpu=H100,
    gpus=160,
    gpus_per_instance=8,
    lengths=_GPQA,
    steps_per_epoch=2,
    epochs=3,
    gpu_hour=GPU_HOUR["H100"],
    weight_load_seconds=6.0,
    **_BATCHES["grpo"],
)
_TAILS = replace(
    _LARGE,
    name="h100-1024-70b-32k",
    gpus=1024,
    lengths=LengthStatistics(median=1200, longest=32_768, prompt_median=300, runaways=0.01),
    prompts_per_step=512,
    weight_load_seconds=16.0,
)

_QWEN_32B = ModelShape("Qwen2.5-32B", 32.8e9, 262_144, 64)
_QWEN3_8B = ModelShape("Qwen3-8B", 8.19e9, 147_456, 36)
_REASONING = LengthStatistics(median=2000, longest=16_384, prompt_median=200, runaways=0.02)
"""Reasoning in mathematics and code: a median of 2,000 tokens, and long tails. Assumed."""


def _users() -> list[Scenario]:
    """Return what people train: reasoning models on one node, four and eight nodes of H100."""
    common: dict[str, Any] = {
        "gpu": H100, "algorithm": "grpo", "samples_per_prompt": 16, "steps_per_epoch": 2, "epochs": 3,
        "gpu_hour": GPU_HOUR["H100"],
    }  # fmt: skip
    return [
        Scenario(
            name="h100-8-8b-8k", model=_QWEN3_8B, gpus=8, gpus_per_instance=1, prompts_per_step=64,
            lengths=replace(_REASONING, median=1000, longest=8192), **common,
        ),
        Scenario(
            name="h100-32-7b-16k", model=QWEN_7B, gpus=32, gpus_per_instance=1, prompts_per_step=128,
            lengths=_REASONING, **common,
        ),
        Scenario(
            name="h100-64-32b-32k", model=_QWEN_32B, gpus=64, gpus_per_instance=4, prompts_per_step=128,
            lengths=replace(_REASONING, median=3000, longest=32_768), weight_load_seconds=4.0, **common,
        ),
    ]  # fmt: skip


STUDIED = tuple(scenario.name for scenario in (*_paper(), _LARGE, _TAILS))
"""The paper's settings, and two large ones."""
USERS = tuple(scenario.name for scenario in _users())
SCENARIOS = {scenario.name: scenario for scenario in (*_paper(), _LARGE, _TAILS, *_users())}
"""All scenarios by name; the first is the paper's best case."""


def on_platform(scenario: Scenario, name: str) -> Scenario:
    """Return the scenario with the starts of a platform.

    Raises:
        ValueError: naming all platforms.
    """
    if name not in PLATFORMS:
        raise ValueError(f"platform is {name!r}: choose one of {', '.join(PLATFORMS)}")
    platform = PLATFORMS[name]
    return replace(
        scenario,
        startup_seconds=platform.startup_seconds,
        trainer_start_seconds=platform.trainer_start_seconds,
        sleeps=platform.sleeps,
    )


def find_scenario(name: str) -> Scenario:
    """Return the scenario with this name.

    Raises:
        ValueError: naming all scenarios.
    """
    if name not in SCENARIOS:
        raise ValueError(f"scenario is {name!r}: choose one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name]
