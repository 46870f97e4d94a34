"""The GPUs that a job's stages need: chosen where the job leaves them out, refused where they are too few."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhfless_functions.api import Stage
from rlhfless_operator.job.instance_gpus import needed_gpus
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.latency.roofline import Gpu, ModelShape
from rlhfless_operator.planner.memory import (
    LearnerSetup,
    Memory,
    engine_memory,
    learner_memory,
    preparation_memory,
    sizes_of,
    usable_bytes,
)
from rlhfless_operator.simulator.scenarios import NODE_GPUS
from rlhfless_operator.training.costs.passes import Passes

_MOST_LEARNER_GPUS = 64
_SHORT_TOKENS = 4096


@dataclass(frozen=True)
class Fit:
    """GPUs of each stage, and the memory that it takes of each of them."""

    tensor_parallel: int
    learner: int
    """GPUs of all learning instances of a step together."""
    learners: list[int]
    """Other numbers of learner's GPUs that fit, rising; those that the job names are the only ones."""
    bytes: dict[Stage, float]
    """Bytes of tensors on each GPU."""
    chosen: list[str]
    """Fields that the job leaves out, with their values here."""


def fit_job(spec: RLHFJobSpec, model: ModelShape, gpu: Gpu, gpus: int | None = None) -> Fit:
    """Return the GPUs of a job's stages.

    Args:
        gpus: of a generation instance; by default those that the job names, or else the fewest that fit.

    Raises:
        ValueError: a stage's model does not fit; the message names the field and the least that fits.
    """
    setup, chosen = learner_setup(spec, model, gpu), []
    parallel, engine = _engine(spec, model, gpu, gpus)
    if gpus is None and not _names_parallel(spec):
        chosen.append(f"generation.vllm.tensorParallelSize: {parallel}")
    learners = _learners(spec, model, gpu, setup)
    if _named_processes(spec) is None:
        chosen.append(f"learning.processes: {learners[0] // spec.learning.instances.max}")
    preparation = _preparation(spec, model, gpu, setup)
    learner = learner_memory(model, replace(setup, ranks=learners[0]))
    memory: dict[Stage, float] = {"generation": engine.total, "preparation": preparation, "learning": learner.total}
    return Fit(parallel, learners[0], learners, memory, chosen)


def learner_setup(spec: RLHFJobSpec, model: ModelShape, gpu: Gpu) -> LearnerSetup:
    """Return what of a job's settings the learner's memory depends on."""
    sizes_of(model)
    learning, bfloat16 = spec.learning, spec.model.dtype == "bfloat16"
    return LearnerSetup(
        tokens=max(spec.batch.microbatch_tokens, spec.sampling.max_prompt_tokens + spec.sampling.max_response_tokens),
        checkpointing=learning.gradient_checkpointing,
        offload=spec.optimizer.offload,
        muon=spec.optimizer.name == "muon",
        critic=Passes(spec).has_critic,
        lora_rank=spec.model.lora.rank if spec.model.lora is not None else None,
        bfloat16=bfloat16 if learning.autocast is None else learning.autocast,
        chunk_tokens=learning.logits_chunk_tokens,
        gpu_memory=gpu.memory,
    )


def least_learner(model: ModelShape, gpu: Gpu, setup: LearnerSetup, step: int = 1) -> int | None:
    """Return the fewest GPUs, a power of two times `step`, that a learner fits; None if too many would be needed."""
    most = 1 if setup.muon else _MOST_LEARNER_GPUS
    counts = (step * 2**power for power in range(7) if step * 2**power <= most)
    return next((ranks for ranks in counts if _fits(model, gpu, replace(setup, ranks=ranks))), None)


def _fits(model: ModelShape, gpu: Gpu, setup: LearnerSetup) -> bool:
    return learner_memory(model, setup).total <= usable_bytes(gpu)


def _named_processes(spec: RLHFJobSpec) -> int | None:
    return needed_gpus(spec)["learning"] if spec.rehearsal is not None else spec.learning.processes


def _learners(spec: RLHFJobSpec, model: ModelShape, gpu: Gpu, setup: LearnerSetup) -> list[int]:
    """Return the numbers of learner's GPUs that fit, those of the job alone if it names them."""
    instances, named = spec.learning.instances.max, _named_processes(spec)
    if named is not None and _fits(model, gpu, replace(setup, ranks=named * instances)):
        return [named * instances]
    if named is None:
        counts = [instances * each for each in (1, 2, 4, NODE_GPUS)][: 1 if setup.muon else None]
        if fitting := [ranks for ranks in counts if _fits(model, gpu, replace(setup, ranks=ranks))]:
            return fitting
    ranks = instances * (named or (1 if setup.muon else NODE_GPUS))
    needed = learner_memory(model, replace(setup, ranks=ranks)).total
    where = f"each of {ranks} GPUs" if ranks > 1 else "its GPU"
    raise ValueError(
        f"learning.processes is {named or 'left out'}: {model.name} needs {needed / 1e9:.0f} GB on {where} of the"
        f" learner, and tensors can have {usable_bytes(gpu) / 1e9:.0f} GB of {gpu.name}; {_least(model, gpu, setup)}"
    )


def _least(model: ModelShape, gpu: Gpu, setup: LearnerSetup) -> str:
    """Say the least that fits: more GPUs, or else settings that need less memory too."""
    for other, words in _thriftier(setup):
        if (ranks := least_learner(model, gpu, other)) is not None:
            return f"the least that fits is {', '.join([_gpus_as_fields(ranks), *words])}"
    return "no setting fits this GPU: take a smaller model, or GPUs with more memory"


def _thriftier(setup: LearnerSetup) -> Iterator[tuple[LearnerSetup, list[str]]]:
    """Yield settings that need ever less memory, as they are first, with the fields that differ."""
    words: list[str] = []
    yield setup, words
    if not setup.checkpointing:
        setup, words = replace(setup, checkpointing=True), [*words, "learning.gradientCheckpointing: true"]
        yield setup, words
    if setup.tokens > _SHORT_TOKENS:
        shorter = f"batch.microbatchTokens: {_SHORT_TOKENS}, and no longer samples"
        setup, words = replace(setup, tokens=_SHORT_TOKENS), [*words, shorter]
        yield setup, words
    if not setup.offload:
        yield replace(setup, offload=True), [*words, "optimizer.offload: true"]
    if setup.lora_rank is None:
        yield replace(setup, lora_rank=16), [*words, "model.lora: {rank: 16}"]


def _gpus_as_fields(ranks: int) -> str:
    if ranks <= NODE_GPUS:
        return f"learning.processes: {ranks}"
    instances = ranks // NODE_GPUS
    return f"learning.processes: {NODE_GPUS}, learning.instances: {{min: {instances}, max: {instances}}}"


def _preparation(spec: RLHFJobSpec, model: ModelShape, gpu: Gpu, setup: LearnerSetup) -> float:
    """Return the bytes that preparation takes on its GPU; 0 if it computes nothing there.

    Raises:
        ValueError: they are too many.
    """
    passes = Passes(spec)
    shares = spec.model.lora is not None and passes.prepares_log_probs
    models = passes.preparation - shares
    if not passes.preparation_computes:
        return 0.0
    needed = preparation_memory(model, setup, models).total
    if needed > usable_bytes(gpu):
        remedy = "algorithm.kl.coefficient: 0" if passes.has_reference else "another advantage than gae"
        raise ValueError(
            f"preparation: {models} × {model.name} for reference and critic need {needed / 1e9:.0f} GB on one GPU, and"
            f" tensors can have {usable_bytes(gpu) / 1e9:.0f} GB of {gpu.name}; it computes on a single GPU: set"
            f" {remedy}, or take GPUs with more memory"
        )
    return needed


def _names_parallel(spec: RLHFJobSpec) -> bool:
    given = "tensor_parallel_size" in spec.generation.vllm.model_fields_set
    return given or spec.rehearsal is not None or spec.generation.engine == "transformers"


def _engine(spec: RLHFJobSpec, model: ModelShape, gpu: Gpu, gpus: int | None) -> tuple[int, Memory]:
    """Return the GPUs of a generation instance and their memory.

    Raises:
        ValueError: the model does not fit.
    """
    vllm = spec.generation.vllm
    room = gpu.memory * vllm.gpu_memory_utilization
    memory = _engine_memory_of(spec, model)
    if gpus is None:
        gpus = needed_gpus(spec)["generation"] if _names_parallel(spec) else None
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus is {gpus}: an instance has at least 1")
    heads = sizes_of(model).heads
    fitting = [each for each in (1, 2, 4, NODE_GPUS) if heads % each == 0 and memory(each).total <= room]
    if gpus is None and fitting:
        return fitting[0], memory(fitting[0])
    if gpus is not None and memory(gpus).total <= room:
        return gpus, memory(gpus)
    tried = gpus or 1
    remedy = f"use at least {fitting[0]}" if fitting else "take a smaller model, or GPUs with more memory"
    raise ValueError(
        f"generation.vllm.tensorParallelSize (gpus) is {tried}: {model.name} needs {memory(tried).total / 1e9:.0f} GB"
        f" on each GPU and does not fit {tried} × {gpu.name}; {remedy}"
    )


def _engine_memory_of(spec: RLHFJobSpec, model: ModelShape) -> Callable[[int], Memory]:
    """Return the memory of an engine by its number of GPUs."""
    vllm, sampling = spec.generation.vllm, spec.sampling
    tokens = vllm.max_model_len or sampling.max_prompt_tokens + sampling.max_response_tokens
    wide = 4 if spec.model.dtype == "float32" else 1 if vllm.quantization == "fp8" else 2
    settings: dict[str, Any] = {"weight_bytes": wide, "lora_rank": spec.model.lora and spec.model.lora.rank}
    return lambda gpus: engine_memory(model, gpus, tokens, **settings)
