"""The peer: TRL's GRPOTrainer on the quickstart's model, data, reward, sizes and thread count, in one process.

    python benchmarks/peers/trl_grpo.py                        # the quickstart's own model and data
    python benchmarks/peers/trl_grpo.py --random-model         # the same architecture untrained, data drawn afresh
    python benchmarks/peers/trl_grpo.py --tools                # the example with tools, by TRL's environment_factory

Prints one JSON object. A step is what the quickstart calls one: 32 prompts × 8 samples are generated, scored and learnt
from in eight optimizer updates of 32 samples. TRL expresses that as `steps_per_generation=8` without accumulation. Its
defaults that would make it slower here (gradient checkpointing, bfloat16 autocast on a CPU) are off, as they are in the
quickstart. Steps are timed in the trainer's own callbacks, everything between two of them included.
"""

import argparse
import importlib.util
import json
import random
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.trainer_callback import PrinterCallback
from trl.chat_template_utils import qwen3_template

from benchmarks.peers.trl_timing import StageTimer, TimedTrainer
from benchmarks.shared.places import QUICKSTART, TOOLS

PROMPTS_PER_STEP = 32
SAMPLES_PER_PROMPT = 8
MINIBATCH_SAMPLES = 32
UPDATES_PER_STEP = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT // MINIBATCH_SAMPLES
MAX_RESPONSE_TOKENS = 224
MOST_TURNS = 12
JOB_STEPS = 48
WARMUP_STEPS = 3
ALPHABET = "0123456789+-=;#?:\n .,ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def load_module(path: Path) -> ModuleType:
    """Import a Python file by its path."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise SystemExit(f"{path} is not there: run from a clone of the repository")
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def random_model(folder: Path) -> None:
    """Save an untrained model of the quickstart's size; it ends a response with about one token in 80."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def random_prompts() -> list[dict[str, str]]:
    """Prompts of the quickstart's task."""
    drawn = load_module(QUICKSTART / "chains.py").draw_chains(random.Random(0), 256)
    return [{"prompt": chain.prompt, "ground_truth": str(chain.result)} for chain in drawn]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The quickstart's training prompts."""
    if not path.is_file():
        raise SystemExit(f"{path} is not there: make the quickstart's assets first, or use --random-model")
    return [json.loads(line) for line in path.read_text().splitlines()]


def acting(model: Path) -> dict[str, Any]:
    """The example's environment in TRL's words. Its calls are read by Qwen 3's pattern, with our marks of turns."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    pattern = json.dumps(qwen3_template).replace("<|im_start|>assistant\\n", "<|assistant|>").replace("im_end", "end")
    tokenizer.response_template = json.loads(pattern)
    return {"environment_factory": load_module(TOOLS / "counter.py").Counter, "processing_class": tokenizer}


def solved(environments: list[Any], **_: Any) -> list[float]:
    """What the environments return."""
    return [environment.get_reward() for environment in environments]


def configuration(folder: Path, steps: int, seed: int) -> trl.GRPOConfig:
    """The quickstart's job in TRL's words. Its numbers are those of the example with tools, too."""
    return trl.GRPOConfig(
        max_tool_calling_iterations=MOST_TURNS - 1,
        output_dir=str(folder),
        per_device_train_batch_size=MINIBATCH_SAMPLES,
        gradient_accumulation_steps=1,
        steps_per_generation=UPDATES_PER_STEP,
        num_generations=SAMPLES_PER_PROMPT,
        num_iterations=1,
        max_completion_length=MAX_RESPONSE_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.005,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=2e-4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_STEPS * UPDATES_PER_STEP,
        max_steps=steps * UPDATES_PER_STEP,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_num_workers=0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )


def measure(
    model: Path,
    prompts: list[dict[str, Any]],
    reward: Callable[..., list[float]],
    steps: int,
    skipped: int,
    seed: int,
    **given: Any,
) -> dict[str, Any]:
    """Train, and say what a step took."""
    rewards: list[float] = []
    lengths: list[float] = []

    def counted(**columns: Any) -> list[float]:
        scores = reward(**columns)
        rewards.append(statistics.fmean(scores))
        lengths.append(statistics.fmean(map(len, columns["completion_ids"])))
        return scores

    timer = StageTimer(UPDATES_PER_STEP)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=str(model),
            args=configuration(Path(folder), steps, seed),
            train_dataset=Dataset.from_list(prompts),
            reward_funcs=counted,
            callbacks=[timer],
            **given,
        )
        trainer.timer = timer
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {
        "step_seconds": statistics.median(timer.steps[skipped:]),
        "generation_seconds": statistics.median(timer.generation[skipped:]),
        "preparation_seconds": statistics.median(timer.preparation[skipped:]),
        "learning_seconds": statistics.median(timer.learning[skipped:]),
        "cpu_seconds": statistics.median(timer.cpu[skipped:]),
        "steps": [round(seconds, 4) for seconds in timer.steps],
        "response_tokens": lengths,
        "rewards": rewards,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Time TRL's GRPOTrainer on the quickstart.")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; by default the example's")
    parser.add_argument("--data", type=Path, help="prompts and their ground truth; by default the example's")
    parser.add_argument("--random-model", action="store_true", help="an untrained model, and prompts drawn afresh")
    parser.add_argument("--tools", action="store_true", help="the example with tools, and not the quickstart")
    parser.add_argument("--steps", type=int, default=8, help=f"steps to run; the job has {JOB_STEPS}")
    parser.add_argument("--skip", type=int, default=1, help="first steps left out of the medians")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--seed", type=int, default=0, help="seed of TRL's sampling and shuffling")
    arguments = parser.parse_args()
    if not 0 <= arguments.skip < arguments.steps:
        parser.error("--skip: leave at least one step to measure")

    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    example = TOOLS if arguments.tools else QUICKSTART
    reward = solved if arguments.tools else load_module(QUICKSTART / "reward.py").reward
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or example / "model"
        if arguments.random_model:
            model = Path(folder)
            random_model(model)
        elif not (model / "config.json").is_file():
            parser.error(f"--model: {model} is no model folder; make the quickstart's assets, or use --random-model")
        prompts = (
            random_prompts() if arguments.random_model else read_prompts(arguments.data or example / "train.jsonl")
        )
        given = acting(model) if arguments.tools else {}
        measured = measure(model, prompts, reward, arguments.steps, arguments.skip, arguments.seed, **given)
    measured |= {
        "framework": "trl",
        "version": trl.__version__,
        "torch": torch.__version__,
        "threads": arguments.threads,
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
