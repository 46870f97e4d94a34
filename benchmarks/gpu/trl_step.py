"""TRL's side of `measure.py`: its GRPOTrainer with the shape's model, prompts, reward and sizes, in one process.

    python benchmarks/gpu/trl_step.py SHAPE ENGINE MODEL PROMPTS REWARD OUTPUT

ENGINE is `vllm`, in this process on the same device (colocated), or `transformers`. Number formats, activation
checkpointing, the adapter, the size of a pass and the correction for vLLM's log-probabilities are those of our side's
job; TRL's defaults are kept elsewhere. Nothing is written between steps.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from benchmarks.gpu.accelerator import model_dtype
from benchmarks.gpu.job import GPU_MEMORY_SHARE, LEARNING_RATE
from benchmarks.gpu.shapes import LORA_ALPHA, WORK, Work
from benchmarks.learner.batches import SAMPLES_PER_PROMPT
from benchmarks.peers.trl_grpo import load_module
from benchmarks.peers.trl_timing import StageTimer, TimedTrainer


def configuration(work: Work, engine: str, folder: str) -> GRPOConfig:
    """The shape's step in TRL's words: one optimizer update of all of its samples."""
    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": model_dtype() if work.lora_rank else "float32"},
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.samples // work.micro_batch,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=work.response_tokens,
        use_vllm=engine == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=GPU_MEMORY_SHARE,
        vllm_max_model_length=work.prompt_tokens + work.response_tokens,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        max_steps=work.steps,
        gradient_checkpointing=work.checkpointing,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def measure(name: str, engine: str, model: Path, prompts: Path, reward: Path) -> dict[str, Any]:
    """Train, and say what the steps took."""
    work = WORK[name]
    score = load_module(reward).reward
    lengths: list[float] = []

    def counted(**columns: Any) -> list[float]:
        lengths.append(statistics.fmean(map(len, columns["completion_ids"])))
        scores: list[float] = score(**columns)
        return scores

    adapter = None
    if work.lora_rank:
        from peft import LoraConfig

        adapter = LoraConfig(
            r=work.lora_rank, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    timer = StageTimer(updates_per_step=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=str(model),
            args=configuration(work, engine, folder),
            train_dataset=Dataset.from_list([json.loads(line) for line in prompts.read_text().splitlines()]),
            reward_funcs=counted,
            peft_config=adapter,
            callbacks=[timer],
        )
        trainer.timer = timer
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {
        "step_seconds": timer.steps,
        "stage_seconds": {
            "generation": statistics.median(timer.generation[1:]),
            "preparation": statistics.median(timer.preparation[1:]),
            "learning": statistics.median(timer.learning[1:]),
        },
        "response_tokens": statistics.fmean(lengths),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def main() -> None:
    """Measure, and write what was found."""
    name, engine, model, prompts, reward, output = sys.argv[1:]
    torch.set_flush_denormal(True)
    found = measure(name, engine, Path(model), Path(prompts), Path(reward))
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
