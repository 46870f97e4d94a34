"""The GPU memory that learner, preparation and engine need, counted from the model's sizes.

- Learner, for each trained parameter: weights, gradient and AdamW's two moments in float32, 16 bytes, divided among the
  ranks (ZeRO, arXiv 1910.02054; FSDP2). A frozen backbone below an adapter has 2 bytes.
- Activations, for each token: the tensors that autograd keeps, in the manner of arXiv 2205.05198, counted for this
  learner: products in bfloat16, attention that keeps no scores, logits in chunks. The residual stream of one rank is in
  float32, as autocast leaves it, and that of several ranks in bfloat16.
- One rank has copies of its weights in bfloat16 while a pass lasts (autocast). Several ranks gather whole layers in
  bfloat16 to compute with them, and keep the embeddings whole while a pass lasts (FSDP2). Gradients of whole tensors
  wait in float32 between passes where they take at most a quarter of a GPU.
- Engine: weights divided by tensor parallelism, a pass of the longest prompts, and the keys and values of the longest
  sequence, in the share of memory that vLLM may use.

`benchmarks/planning/learner_memory.py` compares the learner's with what torch counts.
"""

from dataclasses import dataclass, replace

from rlhfless_operator.planner.latency.roofline import Gpu, Layer, ModelShape

CONTEXT_BYTES = 1.5e9
"""Memory of a process on a GPU for the driver's context, kernels and NCCL's buffers. Assumed."""
UNFRAGMENTED = 0.95
"""Part of the memory that torch's allocator can give out as whole blocks. Assumed."""
ENGINE_PASS_TOKENS = 8192
"""Tokens of a pass for which vLLM reserves activations, as its default `max_num_batched_tokens` on such GPUs."""
ENGINE_SEQUENCES = 256
"""Sequences whose logits vLLM reserves, as its default `max_num_seqs`."""
_SHARE_OF_CHUNK = 1 / 64
"""Share of a GPU's memory for a chunk of logits, where the output head multiplies bfloat16."""
_SHARE_OF_GRADIENTS = 1 / 4
"""Share of a GPU's memory that gradients of whole tensors may take between two passes."""
_CHUNK_LOGITS = 2**24
_LEAST_CHUNK_TOKENS = 128
_FORWARD_CHUNKS = 2
"""Tensors of a chunk's logits that exist together in the output head's forward pass: logits and their exponentials."""
_BACKWARD_CHUNKS = 3.5
"""The same in its backward pass: two of the chunk before, in float32 and one more in bfloat16, beside the new one."""
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
    gpu_memory: float = 80e9
    """Bytes of a GPU, on which the learner's chunks and its exchange of gradients depend."""

    @property
    def gathers_narrow(self) -> bool:
        """Whether ranks gather float32 weights in bfloat16."""
        return self.ranks > 1 and self.bfloat16 and self.lora_rank is None


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
    waiting = _waiting_bytes(model.parameters if setup.lora_rank is None else 0.0, setup)
    passing, ending = _passing_bytes(model, layer, setup)
    if not setup.critic:
        return Memory(policy / setup.ranks, max(passing + waiting, ending))
    # The critic is a trained body with a head of one output, whatever trains the policy.
    whole = replace(setup, lora_rank=None, muon=False)
    body = model.parameters - (0 if layer.tied else layer.embedding)
    critic = body * (8 if setup.offload else 16)
    waiting += _waiting_bytes(body, whole)
    critic_passing, critic_ending = _passing_bytes(model, layer, whole, head=False)
    most = max(max(passing, critic_passing) + waiting, ending, critic_ending)
    return Memory((policy + critic) / setup.ranks, most)


def preparation_memory(model: ModelShape, setup: LearnerSetup, models: int) -> Memory:
    """Return the memory of preparation, which computes with whole models on one GPU.

    Args:
        setup: the learner's; preparation has its micro-batches.
        models: how many models it holds: policy, reference and critic.
    """
    layer, width = sizes_of(model), 2 if setup.bfloat16 else 4
    live = setup.tokens * (4 * layer.hidden + width * (2 * layer.hidden + 2 * layer.query + 3 * layer.inner))
    head = _FORWARD_CHUNKS * _chunk_bytes(layer, setup) + 10 * layer.hidden * setup.tokens
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


def _waiting_bytes(learnt: float, setup: LearnerSetup) -> float:
    """Count the gradients of whole tensors that a rank holds between two passes, beyond its part of them."""
    return 4 * learnt * (1 - 1 / setup.ranks) if _waits(learnt, setup) else 0.0


def _waits(learnt: float, setup: LearnerSetup) -> bool:
    """Return whether the ranks exchange gradients once an update, not after each pass."""
    return setup.ranks > 1 and 4 * learnt <= _SHARE_OF_GRADIENTS * setup.gpu_memory


def _passing_bytes(model: ModelShape, layer: Layer, setup: LearnerSetup, *, head: bool = True) -> tuple[float, float]:
    """Count what a forward and backward pass takes at its peak on each rank, besides the state, and at its end."""
    tokens, kept = setup.tokens, _activation_bytes(layer, setup)
    stream = (2 if setup.lora_rank is not None or setup.gathers_narrow else 4) * layer.hidden
    # A checkpointed layer keeps its input, and all of its tensors only while its own backward pass lasts.
    saved = tokens * model.layers * (stream if setup.checkpointing else kept)
    copied = _copied_bytes(model, layer, setup)
    temporary, outside = tokens * _backward_bytes(layer, setup), tokens * (8 * layer.hidden + stream)
    before, after, to_head = _head_bytes(layer, setup) if head else (0.0, 0.0, 0.0)
    forward = copied + max(outside + before, temporary)
    exchanged = 0.0
    if setup.ranks > 1 and setup.lora_rank is None:
        # A layer's gradients are in its gathered format. Those of the layer before are being exchanged, in float32:
        # they are among those that waited, if any did.
        exchanged = (2 if setup.gathers_narrow else 4) * layer.parameters
        exchanged += 0 if _waits(model.parameters, setup) else 4 * layer.parameters
    if setup.checkpointing:
        again = tokens * kept + temporary + copied / model.layers + exchanged
        if setup.ranks > 1:
            again += to_head
        backward = max(outside + after + to_head, again)
    else:
        backward = copied + max(outside + after + to_head, temporary + exchanged + (to_head if setup.ranks > 1 else 0))
    gathered = _gathered_bytes(layer, setup)
    return saved + max(forward, backward) + gathered, _ending_bytes(layer, setup, head=head)


def _ending_bytes(layer: Layer, setup: LearnerSetup, *, head: bool) -> float:
    """Count the gradients outside the layers, which are added and exchanged when a pass ends."""
    if setup.lora_rank is not None:
        return 0.0
    width = 2 if setup.gathers_narrow else 4
    # If the embeddings are the head, too, its gradient waits to be added.
    gradients = layer.embedding * (3 * width if layer.tied and head else width)
    if setup.ranks == 1:
        return gradients
    outside = 1 if layer.tied or not head else 2
    return max(gradients, layer.embedding * outside * (width + 4))


def _head_bytes(layer: Layer, setup: LearnerSetup) -> tuple[float, float, float]:
    """Count what the output head takes in its forward and backward pass, and the gradient of its weights."""
    chunk, frozen = _chunk_bytes(layer, setup), setup.lora_rank is not None
    gradient = 0.0 if frozen else (2 if setup.gathers_narrow else 4) * layer.embedding
    if not setup.bfloat16:
        return _BACKWARD_CHUNKS * chunk, _BACKWARD_CHUNKS * chunk, gradient
    copied = 0.0 if frozen or setup.gathers_narrow else 2 * layer.embedding
    every = 4 * setup.tokens * layer.vocabulary
    # The states' gradient in float32, and the product that is added to it.
    states = 8 * layer.hidden * setup.tokens
    # The rows of the weights' gradient that a chunk computes, in float32, beside the gradient; and their weights.
    rows = 0.0 if frozen else (4 * layer.embedding + copied) * chunk / every
    backward = (_BACKWARD_CHUNKS if chunk < every else _BACKWARD_CHUNKS - 1) * chunk + states + rows
    return _FORWARD_CHUNKS * chunk + copied, backward, gradient


def _activation_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count what autograd keeps of a token in a layer.

    In each of two norms the stream is kept in float32, and its normalised form as the stream is. With a stream in
    float32 each of five products keeps an input of its own; with one in bfloat16 they share two. Attention keeps
    queries, keys, values, its output and the next product's input; a gated feed-forward layer keeps gate, its
    activation, the other factor and their product. A frozen matrix needs no input, but the matrices of its adapter,
    which are in float32, do.
    """
    half = 2 if setup.bfloat16 else 4
    attention = half * (3 * layer.query + 2 * layer.key)
    if setup.gathers_narrow:
        experts = 2 * (layer.chosen * 2 * layer.hidden + 4 * layer.inner)
        return 16 * layer.hidden + attention + (experts if layer.experts else 8 * layer.inner)
    if setup.lora_rank is None:
        norms = 16 * layer.hidden + 5 * half * layer.hidden
        # Grouped products of experts are no part of autocast: they stay in float32.
        experts = 4 * (layer.chosen * 2 * layer.hidden + 4 * layer.inner) - 2 * half * layer.hidden
        return norms + attention + (experts if layer.experts else 4 * half * layer.inner)
    norms, attention = 8 * layer.hidden, half * (2 * layer.query + 2 * layer.key)
    adapter = 4 * (5 * layer.hidden + layer.query + layer.inner + _ADAPTED_MATRICES * setup.lora_rank)
    return norms + attention + adapter + 3 * half * layer.inner


def _backward_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count the tensors of a token that exist together in a feed-forward layer's backward pass."""
    wide = layer.experts and setup.lora_rank is None and not setup.gathers_narrow
    width = 4 if wide or not setup.bfloat16 else 2
    return 2 * width * layer.inner + 4 * layer.hidden


def _copied_bytes(model: ModelShape, layer: Layer, setup: LearnerSetup) -> float:
    """Count the copies in bfloat16 that autocast makes of one rank's float32 weights and keeps until a forward pass
    ends, or until its backward pass without checkpointing."""
    if setup.lora_rank is not None or not setup.bfloat16 or setup.ranks > 1:
        return 0.0
    return 2 * (layer.parameters - layer.expert_parameters) * model.layers


def _gathered_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count whole weights on a rank: those outside the layers, a layer's, and the next one's that arrives."""
    if setup.ranks == 1:
        return 0.0
    outside = layer.embedding * (1 if layer.tied else 2)
    return (2 if setup.bfloat16 else 4) * (outside + 2 * layer.parameters)


def _chunk_bytes(layer: Layer, setup: LearnerSetup) -> float:
    """Count the float32 logits of a chunk."""
    every = 4 * setup.tokens * layer.vocabulary
    if setup.chunk_tokens:
        return min(every, 4 * setup.chunk_tokens * layer.vocabulary)
    if setup.bfloat16:
        return min(every, _SHARE_OF_CHUNK * setup.gpu_memory)
    return min(every, 4 * max(_LEAST_CHUNK_TOKENS, _CHUNK_LOGITS // layer.vocabulary) * layer.vocabulary)
