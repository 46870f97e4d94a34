"""Ratios of a step's updates before anything is learnt: their distance from 1, and what that costs the gradient.

    python benchmarks/learner/first_update.py [--algorithms grpo gspo rloo] [--dtype bfloat16] [--json FILE]

Random models of three shapes learn from random groups of eight, in four updates. A learning rate of 1e-12 keeps the
policy as it was when the step began. Every ratio should then be 1, and nothing should be clipped. Each sample carries
the log-probabilities that preparation computes with published weights.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from benchmarks.learner.batches import draw_samples, learn_request, prepared_samples
from benchmarks.shared.random_models import save_small_tokenizer
from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.api import PrepareRequest
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.learning.state import initial_state
from rlhfless_functions.learning.step import train_step
from rlhfless_functions.preparation.passes import ForwardPasses
from rlhfless_functions.settings import AlgorithmSettings, ModelSettings, SamplingSettings
from rlhfless_functions.weights import load_policy

VOCABULARY, GROUPS, PROMPT, RESPONSE = 4096, 8, 48, 96

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, int]]] = {
    "Qwen3, 12 layers of 256": (Qwen3Config, {"hidden_size": 256, "num_hidden_layers": 12, "head_dim": 64}),
    "Llama, 6 layers of 512": (LlamaConfig, {"hidden_size": 512, "num_hidden_layers": 6}),
    "Qwen2, 24 layers of 256": (Qwen2Config, {"hidden_size": 256, "num_hidden_layers": 24}),
}


def save_model(kind: type[PreTrainedConfig], sizes: dict[str, int], dtype: str, folder: Path) -> None:
    """A random model, with a tokenizer that is never asked."""
    save_small_tokenizer(folder)
    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64
    config = kind(
        vocab_size=VOCABULARY,
        intermediate_size=3 * sizes["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        initializer_range=0.06,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(getattr(torch, dtype)).save_pretrained(folder)


def asked_by_preparation(folder: Path, dtype: Any) -> list[PreparedSample]:
    """Samples with the log-probabilities that preparation computes."""
    samples = prepared_samples(draw_samples(GROUPS, prompt=PROMPT, response=RESPONSE, vocabulary=VOCABULARY))
    model = load_policy(ModelSettings(source=str(folder), dtype=dtype), learn(folder, dtype, "grpo").initial)
    request = PrepareRequest.model_construct(
        sampling=SamplingSettings(), microbatch_tokens=4096, share_prompts=True, pack="auto"
    )
    passes = ForwardPasses(request, samples, 0, torch.device("cpu"), lambda: None)
    for sample, log_probs in zip(samples, passes.log_probs(model.eval()), strict=True):
        sample.old_log_probs = log_probs
        sample.log_probs = log_probs
    return samples


def learn(folder: Path, dtype: str, algorithm: Any) -> Any:
    """A request of four updates that learn nothing."""
    samples = draw_samples(GROUPS, prompt=PROMPT, response=RESPONSE, vocabulary=VOCABULARY)
    request = learn_request(
        folder,
        samples,
        response=RESPONSE,
        microbatch_tokens=4096,
        learning_rate=1e-12,
        total_steps=1,
        model={"dtype": dtype},
        learning={},
    )
    batch = request.batch_settings.model_copy(update={"minibatch_samples": len(samples) // 4})
    whole = AlgorithmSettings(name=algorithm).resolved()
    return request.model_copy(update={"algorithm": whole, "batch_settings": batch})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "gspo", "rloo"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| Model | Algorithm | Least ratio | Greatest | Clipped | Gradient norms of the four updates |")
    print("|---|---|---|---|---|---|")
    for shape, (kind, sizes) in SHAPES.items():
        with tempfile.TemporaryDirectory() as name:
            save_model(kind, sizes, arguments.dtype, Path(name))
            samples = asked_by_preparation(Path(name), arguments.dtype)
            for algorithm in arguments.algorithms:
                request = learn(Path(name), arguments.dtype, algorithm)
                batch = TrainingBatch(samples, request.algorithm, 1)
                report = train_step(initial_state(request), batch, request, 1, lambda: None)
                summary, norms = report.summary(), report.policy.gradient_norms
                clipped = summary["clip_low"] + summary["clip_high"]
                rows.append(
                    {
                        "model": shape,
                        "algorithm": algorithm,
                        "ratio_min": summary["ratio_min"],
                        "ratio_max": summary["ratio_max"],
                        "clipped": clipped,
                        "gradient_norms": norms,
                    }
                )
                cells = [shape, algorithm, f"{summary['ratio_min']:.7f}", f"{summary['ratio_max']:.7f}"]
                cells += [f"{clipped:.3f}", ", ".join(f"{norm:.3f}" for norm in norms)]
                print(f"| {' | '.join(cells)} |", flush=True)
    result = {**described_run(("torch", "transformers")), "dtype": arguments.dtype, "rows": rows}
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
