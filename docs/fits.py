"""Write docs/which-model.md: which model fits which GPUs, as `rlhfless plan` counts.

python docs/fits.py > docs/which-model.md
"""

from dataclasses import replace

from rlhfless_operator.planner.latency.roofline import GPUS, Gpu, ModelShape
from rlhfless_operator.planner.memory import LearnerSetup, engine_memory, preparation_memory, usable_bytes
from rlhfless_operator.simulator.fitting import least_learner
from rlhfless_operator.training.costs.model_shape import find_shape

MODELS = (
    "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B",
    "Qwen3-30B-A3B", "Mixtral-8x7B",
)  # fmt: skip
SETUP = LearnerSetup(tokens=4096, checkpointing=True)
SEQUENCE = 4096
UTILIZATION = 0.9
_COLUMNS = "| Model | Parameters | Full | Offload | Adapter | Engine | Reference |"
HEAD = f"""# Which model on which GPUs

The tables have the fewest GPUs on which each stage of a job fits, with bfloat16 arithmetic, micro-batches and sequences
of {SETUP.tokens} tokens (`batch.microbatchTokens`) and `learning.gradientCheckpointing: true`. `rlhfless plan` counts
the same for your own job. It chooses `learning.processes` and `generation.vllm.tensorParallelSize` where you leave them
out, and refuses a job that does not fit ([planning](planning.md#which-gpus-it-takes)).

- *Full*: GPUs of a learner that trains all weights. More than 8 are several instances (`learning.instances`).
- *Offload*: the same with `optimizer.offload: true`. Moments and a copy of the weights are in the host's memory.
- *Adapter*: GPUs of a learner with `model.lora: {{rank: 16}}`. An adapter leaves experts out.
- *Engine*: GPUs of an instance that generates (`tensorParallelSize`).
- *Reference*: whether one GPU holds the reference model of a KL penalty, which preparation asks.

A dash means that not even 64 GPUs of the learner, or 8 of an engine, suffice. A model of experts has all of them in
memory. A token passes some of them only: the active parameters.
"""
FOOT = """
## What is counted

A trained parameter takes 16 bytes: weight, gradient and AdamW's two moments in float32, divided among the learner's
GPUs. Besides these, each GPU has the activations of its micro-batch, and three or four chunks of logits, each of a 64th
of its memory. One GPU alone has a copy of all layers' weights in bfloat16 while a pass lasts. Several GPUs have the
embeddings and two layers in bfloat16, and a layer's gradients in float32. Gradients of whole tensors wait on each GPU
between two passes where they take a quarter of its memory at most: of up to 5 billion parameters on 80 GB.

The account of the learner was compared with what torch counts for the same step
(`benchmarks/planning/learner_memory.py`). On one H200 a 0.5B model's learner took 44.1 GB, and the account says 44.7
(`benchmarks/gpu/results/h200.json`). Of a GPU's memory 5 % and 1.5 GB are left to fragments and the driver. Both are
assumed. An engine has vLLM's 90 %.

`python docs/fits.py > docs/which-model.md` makes this page.
"""


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for gpu in GPUS.values():
        lines += [f"## {gpu.name}, {gpu.memory / 1e9:.0f} GB\n"]
        lines += [_COLUMNS, "|---|---|---|---|---|---|---|"]
        lines += [_row(find_shape(name), name, gpu) for name in MODELS] + [""]
    return "\n".join(lines).rstrip("\n") + "\n" + FOOT


def _row(model: ModelShape, name: str, gpu: Gpu) -> str:
    size = f"{model.parameters / 1e9:.1f} B"
    if model.active_parameters < model.parameters:
        size += f", {model.active_parameters / 1e9:.1f} B active"
    setup = replace(SETUP, gpu_memory=gpu.memory)
    setups = (setup, replace(setup, offload=True), replace(setup, lora_rank=16))
    learners = [_cell(least_learner(model, gpu, setup)) for setup in setups]
    fitting = (n for n in (1, 2, 4, 8) if engine_memory(model, n, SEQUENCE).total <= UTILIZATION * gpu.memory)
    reference = preparation_memory(model, setup, 1).total <= usable_bytes(gpu)
    cells = [name, size, *learners, _cell(next(fitting, None)), "yes" if reference else "–"]
    return f"| {' | '.join(cells)} |"


def _cell(count: int | None) -> str:
    return "–" if count is None else str(count)


if __name__ == "__main__":
    print(page(), end="")
