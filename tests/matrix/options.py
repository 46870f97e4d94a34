"""The matrix's axes: every public option of a job, with the values that whole jobs are run with.

A choice and a switch need no line here: all that the document's model knows of them are run. Anything else needs one in
`VALUES`, or in `ELSEWHERE` if it is run by other tests; `test_matrix` fails until it has.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from rlhfless_operator.job.reading.fields import DocumentField, walk
from rlhfless_operator.job.spec import RLHFJobSpec

LEFT_OUT: Any = object()
"""The option is not written."""

DIGITS = {"name": "digits", "python": {"file": "reward.py"}}
"""A reward that every policy gets some of: there is always something to learn."""


def _beside_digits(**reward: Any) -> list[dict[str, Any]]:
    return [DIGITS, {"name": "other", "weight": 0.5, "timeout": "30s", "memory": "2Gi", **reward}]


VALUES: dict[str, tuple[Any, ...]] = {
    "model.lora": (
        LEFT_OUT,
        {"rank": 4, "alpha": 8.0},
        {"rank": 2, "targetModules": ["q_proj", "v_proj"], "export": "adapter"},
        {"rank": 2, "dropout": 0.1, "export": "merged"},
    ),
    "model.tokenizer": (LEFT_OUT, "$MODEL"),
    "algorithm.kl": (
        LEFT_OUT,
        {"coefficient": 0.01},
        {"coefficient": 0.01, "placement": "loss", "estimator": "k2"},
        {"coefficient": 0.01, "placement": "loss", "estimator": "k3"},
        {"coefficient": 0.01, "placement": "reward", "estimator": "k1"},
        {"coefficient": 0.01, "placement": "reward"},
    ),
    "algorithm.critic": (LEFT_OUT, {"warmupSteps": 1}, {"learningRate": 1e-3, "valueClip": None}),
    "algorithm.gamma": (LEFT_OUT, 0.99),
    "algorithm.gaeLambda": (LEFT_OUT, 0.95),
    "algorithm.clipLow": (LEFT_OUT, 0.1),
    "algorithm.clipHigh": (LEFT_OUT, 0.3),
    "algorithm.dualClip": (LEFT_OUT, 3.0),
    "algorithm.entropyCoefficient": (LEFT_OUT, 0.01),
    "algorithm.epochs": (LEFT_OUT, 2),
    "algorithm.sapoTemperaturePositive": (LEFT_OUT, 2.0),
    "algorithm.sapoTemperatureNegative": (LEFT_OUT, 2.0),
    "algorithm.importanceSampling": (
        LEFT_OUT,
        {"mode": "none"},
        {"mode": "truncate", "level": "token", "high": 1.5},
        {"mode": "mask", "low": 0.5, "high": 5.0},
        {"mode": "mask", "level": "sequence_product", "high": 3.0},
        {"mode": "truncate", "level": "geometric_mean", "low": 0.99, "high": 1.01},
        {"rejection": {"low": 0.5, "high": 2.0}},
        {"mode": "none", "rejection": {"level": "token", "high": 2.0}},
        {"mode": "truncate", "rejection": {"level": "sequence_product", "low": 0.1, "high": 10.0}},
        {"mode": "truncate", "rejection": {"level": "geometric_mean", "high": 1.01}},
    ),
    "algorithm.dynamicSamplingRounds": (LEFT_OUT, 0, 2),
    "rewards": (
        [DIGITS],
        [{"name": "score", "python": {"file": "score.py", "function": "compute_score", "style": "verl"}}],
        _beside_digits(http={"url": "$SERVER"}),
        _beside_digits(model={"source": "$REWARD_MODEL"}),
        _beside_digits(exactMatch={"pattern": "([0-9])", "requireEnd": True, "timeout": "2s"}),
        _beside_digits(math={"requireEnd": True, "timeout": "2s"}),
        _beside_digits(format={"pattern": ".*[0-9].*", "timeout": "2s"}),
        _beside_digits(length={"bufferTokens": 8}),
        _beside_digits(code={"testsColumn": "checks", "timeout": "5s"}),
        [{**DIGITS, "onError": "fail"}, {"name": "odd", "onError": "unscorable", "python": {"file": "raises.py"}}],
    ),
    "data": (
        {"source": "train.jsonl"},
        {
            "source": "train.parquet",
            "format": "parquet",
            "shuffle": False,
            "longPrompts": "fail",
            "answeredPrompts": "fail",
        },
        {"source": "saved", "format": "datasets", "shuffle": True, "longPrompts": "drop"},
        {"source": "train.jsonl", "format": "jsonl", "promptColumn": "question", "groundTruthColumn": "truth"},
        {
            "source": "train.jsonl",
            "format": "auto",
            "promptColumn": "messages",
            "systemPrompt": "add",
            "chatTemplateKwargs": {"enable_thinking": False},
            "answeredPrompts": "continue",
        },
    ),
    "sampling.temperature": (LEFT_OUT, 0.8),
    "sampling.maxPromptTokens": (32,),
    "sampling.maxResponseTokens": (16, 9),
    "sampling.stop": (["7", "+", "0"], LEFT_OUT),
    "batch.promptsPerStep": (3,),
    "batch.samplesPerPrompt": (4, 2),
    "batch.minibatchSamples": (LEFT_OUT, 6),
    "batch.microbatchTokens": (LEFT_OUT, 48),
    "optimizer.learningRate": (1e-3,),
    "optimizer.beta1": (LEFT_OUT, 0.8),
    "optimizer.beta2": (LEFT_OUT, 0.99),
    "optimizer.epsilon": (LEFT_OUT, 1e-6),
    "optimizer.weightDecay": (LEFT_OUT, 0.1),
    "optimizer.warmupSteps": (LEFT_OUT, 1),
    "optimizer.finalRatio": (LEFT_OUT, 0.5),
    "optimizer.maxGradientNorm": (LEFT_OUT, 0.1),
    "async": (
        LEFT_OUT,
        {},
        {"maxStaleness": 1, "newWeights": "finish", "tooStale": "wait"},
        {"maxStaleness": 2, "newWeights": "switch", "kvCache": "recompute"},
        {"maxStaleness": 2, "newWeights": "switch", "kvCache": "keep"},
        {"maxStaleness": 2, "tooStale": "drop"},
        {"maxStaleness": 1, "tooStale": "downweight"},
    ),
    "steps": (2, LEFT_OUT),
    "epochs": (LEFT_OUT, 1),
    "seed": (LEFT_OUT, 7),
    "generation.instances": ({"min": 1, "max": 1}, {"min": 2, "max": 2}, {"min": 1, "max": 3}, {"min": 2}),
    "generation.engine": (LEFT_OUT, "transformers"),
    "generation.keepAlive": (LEFT_OUT, "0s", "5s"),
    "generation.kvBudgetTokens": (LEFT_OUT, 128),
    "generation.flush": (LEFT_OUT, "50ms"),
    "preparation.instances": (LEFT_OUT, {"min": 1, "max": 2}, {"min": 2, "max": 2}, {"min": 2}),
    "preparation.keepAlive": (LEFT_OUT, "0s", "5s"),
    "learning.keepAlive": (LEFT_OUT, "0s", "5s"),
    "learning.processes": (LEFT_OUT, 1, 2),
    "learning.logitsChunkTokens": (LEFT_OUT, 8),
    "planning.lambda": (LEFT_OUT, 0.0, 1.0),
    "planning.migration.ratio": (LEFT_OUT, 0.3),
    "planning.migration.slots": (LEFT_OUT, 4),
    "planning.migration.period": (LEFT_OUT, "50ms"),
    "planning.migration.hysteresis": (LEFT_OUT, 0.0),
    "planning.migration.movesPerSample": (LEFT_OUT, 0),
    "prices": (
        {"instanceHour": "0.10", "currency": "EUR"},
        {"accelerators": {"H100": "0.20"}, "spot": {"H100": "0.05"}},
        {"stages": {"generation": "0.20", "preparation": "0.10", "learning": "0.30"}},
    ),
    "budget": (LEFT_OUT, {"money": "1000.00", "gpuHours": 1000.0}),
    "evaluation": (
        LEFT_OUT,
        {"data": {"source": "train.jsonl"}},
        {
            "data": {
                "source": "train.parquet",
                "format": "parquet",
                "promptColumn": "messages",
                "groundTruthColumn": "truth",
                "systemPrompt": "add",
                "chatTemplateKwargs": {"enable_thinking": False},
                "longPrompts": "fail",
                "shuffle": False,
            },
            "everySteps": 1,
            "samplesPerPrompt": 2,
        },
        {
            "data": {"source": "train.jsonl"},
            "rewards": [{"name": "right", "exactMatch": {}}],
            "sampling": {"temperature": 0},
        },
    ),
    "checkpoints.everySteps": (LEFT_OUT, 1),
    "checkpoints.keep": (LEFT_OUT, 1),
    "limits.retries": (LEFT_OUT, 0),
    "limits.stall": (LEFT_OUT, "60s"),
    # Two of a step's three prompts may be odd ones, which the reward `odd` does not score.
    "limits.unscorable": (0.7, 0.9),
    "limits.droppedPrompts": (LEFT_OUT, 0.1),
    "limits.mismatch": (LEFT_OUT, 5.0),
    "tracking.sampleGroups": (LEFT_OUT, 0, 2),
    "activeDeadline": (LEFT_OUT, "1h"),
}
"""Values of each option, or of a whole section, by its path below `spec`; `$NAMES` are filled in by `setting`."""

RARE: dict[str, tuple[Any, ...]] = {"learning.compile": (True,), "learning.processes": (2,)}
"""Values that take long: each is run in one job, instead of with every value of every other option."""

ELSEWHERE: dict[str, str] = {
    "environment": "tests/environments, tests/examples/test_tools.py",
    "prices.stages.environment": "tests/training/test_served_environments.py",
    "model.source": "the tiny model",
    "model.revision": "a name on the hub: tests/weights/test_policy.py",
    "model.chatTemplate": "in every job of the matrix, for prompts that are chats",
    **dict.fromkeys(
        tuple(
            f"{data}.{name}"
            for data in ("data", "evaluation.data")
            for name in ("sources", "format", "map", "filter", "subset", "split", "revision")
        ),
        "tests/data/test_sources.py, tests/data/test_hub.py",
    ),
    **dict.fromkeys(("rewards.python.style", "evaluation.rewards.python.style"), "tests/rewards/test_callables.py"),
    "generation.vllm": "where vLLM is installed: tests/generation/engines/vllm",
    "rehearsal": "nothing is trained: tests/training/requests/test_rehearsal.py",
    **dict.fromkeys(("learning.instances", "learning.gangTimeout"), "tests/training/instances/test_gang.py"),
    "artifacts.uri": "in every job of the matrix; object stores in tests/training/test_store_outage.py",
    "tracking.wandb": "not installed: tests/training/journal/test_tracking.py",
    "tracking.mlflow": "not installed: tests/training/journal/test_tracking.py",
    **dict.fromkeys(
        (
            "pods",
            "environment.pods",
            "generation.pods",
            "preparation.pods",
            "learning.pods",
            "pool",
            "priority",
            "suspend",
        ),
        "on a cluster: tests/controller, tests/platforms, e2e",
    ),
    **dict.fromkeys(("backoffLimit", "ttlAfterFinished"), "on a cluster: tests/controller, e2e"),
}
"""Options that the matrix leaves to others, and which."""


BOUND = {
    *("algorithm", "batch", "steps", "epochs", "evaluation", "checkpoints.best", "optimizer.name", "rewards"),
    *(
        "async",
        "learning.overlap",
        "learning.processes",
        "sampling.maxResponseTokens",
        "generation.instances",
        "generation.sharePrefixes",
        "model.lora",
    ),
}
"""Options that the document's rules are about."""

MENDING = (
    *("algorithm.name", "algorithm.advantage", "algorithm.advantageNormalization", "algorithm.dynamicSamplingRounds"),
    *("algorithm.clip", "algorithm.ratioLevel"),
    *("steps", "epochs", "evaluation"),
)
"""Those of them that others ask for."""


@cache
def axes() -> dict[str, tuple[Any, ...]]:
    """Every axis, with its values: those of `VALUES`, and all choices and switches that are below none of them."""
    found = dict(VALUES)
    for path, field in leaves():
        if not _below(path, VALUES) and not _below(path, ELSEWHERE) and (choices := choices_of(field)):
            default = field.info.default
            # An option that is written as what it is anyway is no other job.
            found[path] = (LEFT_OUT, *(choice for choice in choices if choice != default))
    return found


def leaves() -> Iterator[tuple[str, DocumentField]]:
    """Every option that is no section, by its path below `spec`; items of lists are below the list itself."""
    for path, field in walk(RLHFJobSpec):
        if field.model is None:
            yield ".".join(part.removesuffix("[]") for part in path), field


def choices_of(field: DocumentField) -> tuple[Any, ...]:
    """All values of a choice or a switch; none of anything else."""
    return (False, True) if field.kind is bool else field.choices


def values_of(path: str) -> list[Any]:
    """Everything that an option is written as in some job of the matrix."""
    return [value for place, values in axes().items() for each in values for value in _at(path, place, each)]


def bound(path: str) -> bool:
    """Whether an option may make others impossible."""
    return _below(path, BOUND)


def _at(path: str, place: str, value: Any) -> Iterator[Any]:
    if value is LEFT_OUT:
        return
    if path == place:
        yield value
    elif isinstance(value, list) and path.startswith(f"{place}."):
        for item in value:
            yield from _at(path, place, item)
    elif isinstance(value, Mapping) and path.startswith(f"{place}."):
        for name, inner in value.items():
            yield from _at(path, f"{place}.{name}", inner)


def _below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in places)
