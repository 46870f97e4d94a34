"""The GPU memory that learner, preparation and engine need, counted from the model's sizes.

- Learner, for each trained parameter: weights, gradient and AdamW's two moments in float32, 16 bytes, divided among the
  ranks (ZeRO, arXiv 1910.02054; FSDP2). A frozen backbone below an adapter has 2 bytes.
- Activations, for each token: the tensors that autograd keeps, in the manner of arXiv 2205.05198, counted for this
  learner: residual stream in float32, products in bfloat16, attention that keeps no scores, logits in chunks.
- Ranks gather whole layers to compute with them, and keep the embeddings whole while a pass lasts (FSDP2).
- Engine: weights divided by tensor parallelism, a pass of the longest prompts, and the keys and values of the longest
  sequence, in the share of memory that vLLM may use.

`benchmarks/planning/learner_memory.py` compares the learner's with what torch counts.
"""

from dataclasses import dataclass

from rlhfless_operator.planner.latency.roofline import Gpu, Layer, ModelShape

CONTEXT_BYTES = 1.5e9
"""Memory of a process on a GPU for the driver's context, kernels and NCCL's buffers. Assumed."""
UNFRAGMENTED = 0.95
"""Part of the memory that torch's allocator can give out as whole blocks. Assumed."""
ENGINE_PASS_TOKENS = 8192
"""Tokens of a pass for which vLLM reserves activations, as its default `max_num_batched_tokens` on such GPUs."""
ENGINE_SEQUENCES = 256
"""Sequences whose logits vLLM reserves, as its default `max_num_seqs`."""
_CHUNK_LOGITS = 2**24
_LEAST_CHUNK_TOKENS = 128
_CHUNK_TENSORS = 4
"""Tensors of a chunk's logits that exist together in the output head's backward pass."""
_ADAPTED_MATRICES = 7
"""Matrices of a layer that an adapter on all of them has."""


@dataclass(frozen=True)
class LearnerSetup:
    """Settings of a learner on which its memory depends."""

    ranks: int = 1
    tokens: int = 16384
    """Tokens of a micro-batch: `batch.microbatchTokens`, or the longest sample."""
    checkpointing: bool = False
    offload: bool = False
    muon: bool = False
    critic: bool = False
    lora_rank: int | None = None
    bfloat16: bool = True
    """Whether products are in bfloat16."""
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of a process."""

    state: float
    """Weights, gradients and moments; or weights and the least KV cache."""
    passing: float
    """Most bytes that a pass takes besides: activations, gathered and copied weights, logits."""

    @property
    def total(self) -> float:
        """Bytes of all tensors."""
        return self.state + self.passing


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes that tensors of one process can have."""
    return gpu.memory * UNFRAGMENTED - CONTEXT_BYTES


def learner_memory(model: ModelShape, setup: LearnerSetup) -> Memory:
    """Return the memory of a learner's rank."""
    layer = sizes_of(model)
    policy = _state_bytes(model, layer, setup)
    passing = _passing_bytes(model, layer, setup)
    if not setup.critic:
        return Memory(policy / setup.ranks, passing)
    # The critic is a trained body with a head of one output, whatever trains the policy.
    whole = LearnerSetup(**{**vars(setup), "lora_rank": None, "muon": False})
    body = model.parameters - (0 if layer.tied else layer.embedding)
    critic = body * (8 if setup.offload else 16)
    return Memory((policy + critic) / setup.ranks, max(passing, _passing_bytes(model, layer, whole, head=False)))


def preparation_memory(model: ModelShape, setup: LearnerSetup, models: int) -> Memory:
    """Return the memory of preparation, which computes with whole models on one GPU.

    Args:
        setup: the learner's; preparation has its micro-batches.
        models: how many models it holds: policy, reference and critic.
    """
    layer, width = sizes_of(model), 2 if setup.bfloat16 else 4
    live = setup.tokens * (4 * layer.hidden + width * (2 * layer.hidden + 2 * layer.query + 3 * layer.inner))
    # The head widens its weights to float32.
    head = 4 * layer.embedding + 3 * _chunk_bytes(layer, setup)
    return Memory(models * width * model.parameters, max(live, head))


def engine_memory(
    model: ModelShape, gpus: int, sequence_tokens: int, *, weight_bytes: float = 2, lora_rank: int | None = None
) -> Memory:
    """Return the memory of an engine on each of its GPUs, with the KV cache of one sequence.

    Args:
        gpus: of the instance; tensor parallelism divides the model among them.
        sequence_tokens: longest sequence.
        weight_bytes: of a weight.
    """
    layer = sizes_of(model)
    adapter = 4 * _adapter_parameters(model, layer, lora_rank or 0)
    # With fewer heads of keys than GPUs, several GPUs hold the same head.
    share = min(gpus, max(1, layer.key * layer.heads // layer.query))
    cache = sequence_tokens * model.kv_bytes / share
    activations = ENGINE_PASS_TOKENS * 2 * (4 * layer.hidden + (2 * layer.query + 3 * layer.inner) / gpus)
    logits = 2 * 4 * ENGINE_SEQUENCES * layer.vocabulary
    return Memory((weight_bytes * model.parameters + adapter) / gpus + cache, activations + logits)


def sizes_of(model: ModelShape) -> Layer:
    """Return the sizes of a model's layers.

    Raises:
        ValueError: they are not known.
    """
    if model.layer is None:
        raise ValueError(f"the sizes of {model.name} are not known: give the folder of the model, or its config.json")
    return model.layer


def _adapter_parameters(model: ModelShape, layer: Layer, rank: int) -> float:
    """Count an adapter on all matrices of the attention and of dense feed-forward layers."""
    widths = 4 * layer.hidden + 2 * layer.query + 2 * layer.key
    widths += 0 if layer.experts else 3 * (layer.hidden + layer.inner)
    return float(model.layers * rank * widths)


def _state_bytes(model: ModelShape, layer: Layer, setup: LearnerSetup) -> float:
    """Count weights, gradients and moments of the policy on all ranks together."""
    if setup.lora_rank is not None:
        learnt = _adapter_parameters(model, layer, setup.lora_rank)
        return (2 if setup.bfloat16 else 4) * model.parameters + learnt * (8 if setup.offload else 16)
    if setup.offload:
        return 8 * model.parameters
    matrices = model.layers * layer.parameters if setup.muon else 0.0
    return 16 * model.parameters - 4 * matrices


def _passing_bytes(model: ModelShape, layer: Layer, setup: LearnerSetup, *, head: bool = True) -> float:
    """Count what a forward and backward pass takes at its peak on each rank, besides the state."""
    tokens, kept = setup.tokens, _activation_bytes(layer, setup)
    # A checkpointed layer keeps its input, and all of its tensors only while its own backward pass lasts.
    stream = (4 if setup.lora_rank is None else 2) * layer.hidden
    saved = tokens * model.layers * (stream if setup.checkpointing else kept)
    copied = _copied_bytes(model, layer, setup)
    temporary, outside = tokens * _backward_bytes(layer, setup), tokens * 12 * layer.hidden
    logits = _CHUNK_TENSORS * _chunk_bytes(layer, setup) if head else 0.0
    # The head's gradient, or its frozen weights widened to float32.
    wide_head = 4 * layer.embedding if head and (setup.lora_rank is None or setup.bfloat16) else 0.0
    forward = outside + temporary + copied
    if setup.checkpointing:
        again = tokens * kept + temporary + copied / model.layers
        if setup.ranks > 1 and setup.lora_rank is None:
            # The head's gradient waits until the pass ends, and the layer before is still being exchanged.
            again += wide_head + 4 * layer.parameters
        backward = max(outside + logits + wide_head, again)
    else:
        backward = copied + max(outside + logits + wide_head, temporary)
    # The embeddings' gradient is as large as they are. If they are the head, too, its gradient waits to be added.
    ending = 0.0 if setup.lora_rank is not None else layer.embedding * (12 if layer.tied and head else 4)
    return max(saved + max(forward, backward), ending) + _gathered_bytes(layer, setup)


def _activation_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count what autograd keeps of a token in a layer.

    In each of two norms the stream and its normalised form are kept in float32; each of five products keeps an input of
    its own. Attention keeps queries, keys, values, its output and the next product's input; a gated feed-forward layer
    keeps gate, its activation, the other factor and their product. A frozen matrix needs no input, but the matrices of
    its adapter, which are in float32, do.
    """
    half = 2 if setup.bfloat16 else 4
    if setup.lora_rank is None:
        norms, attention = 16 * layer.hidden + 5 * half * layer.hidden, half * (3 * layer.query + 2 * layer.key)
        # Grouped products of experts are no part of autocast: they stay in float32.
        experts = 4 * (layer.chosen * 2 * layer.hidden + 4 * layer.inner) - 2 * half * layer.hidden
        return norms + attention + (experts if layer.experts else 4 * half * layer.inner)
    norms, attention = 8 * layer.hidden, half * (2 * layer.query + 2 * layer.key)
    adapter = 4 * (5 * layer.hidden + layer.query + layer.inner + _ADAPTED_MATRICES * setup.lora_rank)
    return norms + attention + adapter + 3 * half * layer.inner


def _backward_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count the tensors of a token that exist together in a feed-forward layer's backward pass."""
    width = 4 if layer.experts and setup.lora_rank is None else 2 if setup.bfloat16 else 4
    return 2 * width * layer.inner + 4 * layer.hidden


def _copied_bytes(model: ModelShape, layer: Layer, setup: LearnerSetup) -> float:
    """Count the copies in bfloat16 that autocast makes of float32 weights and keeps until a forward pass ends, or until
    its backward pass without checkpointing."""
    if setup.lora_rank is not None or not setup.bfloat16:
        return 0.0
    return 2 * (layer.parameters - layer.expert_parameters) * model.layers


def _gathered_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count whole weights and gradients on a rank: those outside the layers, and a layer's with its gradients."""
    if setup.ranks == 1:
        return 0.0
    outside = layer.embedding * (1 if layer.tied else 2)
    return 4 * outside + 8 * layer.parameters if setup.lora_rank is None else 2 * outside + 4 * layer.parameters


def _chunk_bytes(layer: Layer, setup: LearnerSetup) -> float:
    chunk = setup.chunk_tokens or max(_LEAST_CHUNK_TOKENS, _CHUNK_LOGITS // layer.vocabulary)
    return 4 * min(chunk, setup.tokens) * layer.vocabulary
