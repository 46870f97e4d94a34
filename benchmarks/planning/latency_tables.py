"""Make planner/latency/measured.py, the measured latencies, from the kernel tables of NVIDIA's `aiconfigurator`.

    python3 -m venv ENV && ENV/bin/pip install aiconfigurator==0.4.0
    ENV/bin/python benchmarks/planning/latency_tables.py > operator/rlhfless_operator/planner/latency/measured.py

It needs an environment of its own, since aiconfigurator pins old versions of what this project uses. Nothing of
rlhfless is imported. Version 0.4.0 carries kernel measurements (TensorRT-LLM 1.0) of all four GPUs; a decode step is
the sum of a layer's kernels times the layers, as the package's own SDK composes it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiconfigurator.sdk import models, perf_database

SYSTEMS = {
    "L40S": ("l40s", "1.0.0"),
    "A100": ("a100_sxm", "1.0.0"),
    "H100": ("h100_sxm", "1.0.0rc3"),
    "H200": ("h200_sxm", "1.0.0rc3"),
}
QWEN_3B = ["LLAMA", 36, 16, 2, 128, 2048, 11008, 151936, 32768, 0, 0, 0, None]
"""Layers, heads, KV heads, head size, hidden and intermediate size, vocabulary and context: the package lacks it."""
MODELS = {
    "Qwen2.5-3B": ("QWEN2.5_3B", {"L40S": 1, "A100": 1, "H100": 1, "H200": 1}),
    "Qwen2.5-7B": ("QWEN2.5_7B", {"L40S": 1, "A100": 1, "H100": 1, "H200": 1}),
    "Llama-2-70B": ("LLAMA2_70B", {"L40S": 8, "A100": 8, "H100": 8, "H200": 8}),
}
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (128, 512, 2048, 8192)
PROMPT = 1024
"""Tokens of the prompt that prefill is measured with."""


def step_seconds(model: models.BaseModel, database: perf_database.PerfDatabase, batch: int, context: int) -> float:
    """One decode step of `batch` sequences with `context` tokens each."""
    return (
        sum(
            float(operation.query(database, x=batch, batch_size=batch, beam_width=1, s=context))
            for operation in model.generation_ops
        )
        / 1000
    )


def prefill_token_seconds(model: models.BaseModel, database: perf_database.PerfDatabase) -> float:
    """Prefill of four prompts at once, for each token."""
    batch = 4
    return sum(
        float(
            operation.query(
                database,
                x=batch if "logits_gemm" in operation._name else batch * PROMPT,
                batch_size=batch,
                beam_width=1,
                s=PROMPT,
                prefix=0,
            )
        )
        for operation in model.context_ops
    ) / (1000 * batch * PROMPT)


def main() -> None:
    """Print the module."""
    from aiconfigurator.sdk import common, config, models, perf_database

    common.SupportedModels["QWEN2.5_3B"] = QWEN_3B
    print(f'''"""Measured latencies. Made by benchmarks/planning/latency_tables.py; do not edit.

Source: aiconfigurator {version("aiconfigurator")} (Copyright NVIDIA CORPORATION & AFFILIATES, Apache-2.0), its kernel
measurements of TensorRT-LLM in float16, composed into decode steps. Engines add scheduling and sampling to them.
"""

from rlhfless_operator.planner.latency.linear import DecodeTable

_BATCHES = {BATCHES}
_CONTEXTS = {CONTEXTS}

MEASURED: dict[tuple[str, str, int], DecodeTable] = {{''')
    for gpu, (system, release) in SYSTEMS.items():
        database = perf_database.get_database(system, "trtllm", release)
        for name, (model_name, gpus) in MODELS.items():
            model = models.get_model(model_name, config.ModelConfig(tp_size=gpus[gpu]), "trtllm")
            print(f'    ("{gpu}", "{name}", {gpus[gpu]}): DecodeTable(')
            print("        _BATCHES,\n        _CONTEXTS,\n        (")
            for batch in BATCHES:
                row = ", ".join(f"{step_seconds(model, database, batch, context):.4g}" for context in CONTEXTS)
                print(f"            ({row}),")
            print(f"        ),\n        prefill_token_seconds={prefill_token_seconds(model, database):.4g},\n    ),")
    print('}\n"""By GPU, model and GPUs of an instance: seconds of a decode step."""')


if __name__ == "__main__":
    main()
