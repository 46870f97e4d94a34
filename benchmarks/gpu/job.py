"""The job of our side of `measure.py`'s steps, and the constants that its other side takes from it."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import WORK, model_settings
from benchmarks.learner.batches import SAMPLES_PER_PROMPT

LEARNING_RATE = 1e-6
GPU_MEMORY_SHARE = 0.3
"""Of vLLM: TRL's default, where its learner has the rest at the same time."""

REWARD = '''
def reward(completions, completion_ids, **columns):
    """The share of even tokens: it differs within a group, and costs nothing."""
    return [sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]
'''


def job_document(name: str, engine: str, dtype: str, model: Path, prompts: Path, reward: Path) -> dict[str, Any]:
    """One optimizer update a step, with instances that are kept as long as the job goes.

    Args:
        name: of the shape.
        engine: `vllm` or `transformers`.
        dtype: of the model.
        model: its folder.
        prompts: JSON lines.
        reward: Python file.
    """
    work = WORK[name]
    sequence = work.prompt_tokens + work.response_tokens
    return {
        "apiVersion": "rlhfless.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "benchmark"},
        "spec": {
            "model": model_settings(model, dtype, work.lora_rank),
            "data": {"source": str(prompts)},
            "rewards": [{"name": "even", "python": {"file": str(reward)}}],
            "algorithm": {"name": "grpo"},
            "sampling": {
                "temperature": 1.0,
                "maxPromptTokens": work.prompt_tokens,
                "maxResponseTokens": work.response_tokens,
            },
            "batch": {
                "promptsPerStep": work.prompts,
                "samplesPerPrompt": SAMPLES_PER_PROMPT,
                "microbatchTokens": work.micro_batch * sequence,
            },
            "optimizer": {"learningRate": LEARNING_RATE, "beta2": 0.95, "maxGradientNorm": 1.0},
            "steps": work.steps,
            "generation": {
                "engine": engine,
                "keepAlive": "1h",
                "vllm": {"gpuMemoryUtilization": GPU_MEMORY_SHARE},
            },
            "preparation": {"keepAlive": "1h"},
            "learning": {"processes": 1, "gradientCheckpointing": work.checkpointing, "keepAlive": "1h"},
            "checkpoints": {"everySteps": work.steps},
        },
    }
