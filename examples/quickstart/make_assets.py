"""Makes what the quickstart ships: `train.jsonl`, `heldout.jsonl` and the warm-started checkpoint in `model/`.

    python examples/quickstart/make_assets.py

Reinforcement learning needs a policy that is sometimes right. The warm start is supervised learning on responses of
mixed quality: some give the result at once (nearly always wrong), most work it out but slip now and then. What RL then
does is choose among behaviours that are already there and sharpen them; it teaches no new skill.

The questions of both files are kept out of the warm start. It takes about 20 minutes on one core; the same
seed and number of threads give the same checkpoint.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import chains
import torch
from reward import EOS_TOKEN_ID, reward
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
SEED = 20240501
TRAINING_PROMPTS, HELDOUT_PROMPTS = 256, 200
LONGEST_RESPONSE = 224

BATCH = 32
PEAK_LEARNING_RATE = 6e-3
TERSE_SHARE = 0.4
SLIP = 0.12
PREFIX_FROM = 0.65
"""Share of the steps after which prompts carry their prefix. Rotary positions are relative: the model does not notice
that the prefix is missing before, and two thirds of the steps are much shorter."""

SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
ALPHABET = "\n !#()*+,-./0123456789:;=?AIQRSTWYabcdefghijklmnopqrstuvwxyz"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: byte-pair encoding without merges, 63 entries."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 small enough to learn on two cores, with a head size (32) that every serving engine supports."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=LONGEST_RESPONSE,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def draw_batch(
    generator: random.Random, tokenizer: PreTrainedTokenizerFast, longest: int, prefix: bool, unseen: set[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of prompts with responses of mixed quality.

    Returns:
        Token ids and labels, both [batch, length], right-padded; labels are −100 outside the response.
    """
    tokens, labels = [], []
    while len(tokens) < BATCH:
        chain = chains.draw_chain(generator, longest)
        if chain.question in unseen:
            continue
        terse = generator.random() < TERSE_SHARE
        response = chains.terse_response(chain) if terse else chains.worked_response(chain, generator, SLIP)
        prompt_tokens = tokenizer.encode(chain.prompt if prefix else chain.prompt.removeprefix(chains.PREFIX))
        response_tokens = [*tokenizer.encode(response), tokenizer.eos_token_id]
        tokens.append(torch.tensor(prompt_tokens + response_tokens))
        labels.append(torch.tensor([-100] * len(prompt_tokens) + response_tokens))
    return (
        torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id),
        torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def train(model: Qwen3ForCausalLM, steps: int, draw: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Supervised learning: Muon on matrices, AdamW on the embedding and the norms.

    Args:
        model: the model to train.
        steps: number of updates.
        draw: returns the token ids and labels of a step.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=PEAK_LEARNING_RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    began = time.monotonic()
    for step in range(1, steps + 1):
        rate = PEAK_LEARNING_RATE * min(step / 50, 1.0 - 0.9 * step / steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        tokens, labels = draw(step)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


@torch.inference_mode()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], samples: int, greedy: bool
) -> float:
    """Mean reward of `samples` responses to each prompt, at temperature 1 or greedy."""
    rewards: list[float] = []
    tokenizer.padding_side = "left"
    ordered = sorted(rows, key=lambda row: len(row["prompt"]))
    for start in range(0, len(ordered), 20):
        chunk = [row for row in ordered[start : start + 20] for _ in range(samples)]
        inputs = tokenizer([row["prompt"] for row in chunk], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=not greedy
        )
        completion_ids = []
        for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
            end = ids.index(EOS_TOKEN_ID) + 1 if EOS_TOKEN_ID in ids else len(ids)
            completion_ids.append(ids[:end])
        completions = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        rewards += reward(completions, completion_ids, [row["ground_truth"] for row in chunk])
    tokenizer.padding_side = "right"
    return sum(rewards) / len(rewards)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save it under the class name that both transformers 4 and 5 know."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the data, train, measure, and write the model."""
    parser = argparse.ArgumentParser(description="Make the quickstart's data and checkpoint.")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the warm start")
    parser.add_argument("--threads", type=int, default=1, help="threads; another number gives another checkpoint")
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write to")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(SEED)
    generator = random.Random(SEED)

    problems = chains.draw_chains(generator, TRAINING_PROMPTS + HELDOUT_PROMPTS)
    rows = [{"prompt": chain.prompt, "ground_truth": str(chain.result)} for chain in problems]
    heldout = rows[TRAINING_PROMPTS:]
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.output / "train.jsonl", rows[:TRAINING_PROMPTS])
    write_rows(arguments.output / "heldout.jsonl", heldout)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    unseen = {chain.question for chain in problems}

    def draw(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Chains grow longer, and get their prefix late."""
        done = step / arguments.steps
        longest = min(chains.LONGEST_CHAIN, 2 + math.ceil(2 * done * (chains.LONGEST_CHAIN - 2)))
        return draw_batch(generator, tokenizer, longest, step > PREFIX_FROM * arguments.steps, unseen)

    train(model, arguments.steps, draw)
    model.eval()
    print(f"held out, temperature 1, 8 samples a prompt: {accuracy(model, tokenizer, heldout, 8, greedy=False):.3f}")
    print(f"held out, greedy: {accuracy(model, tokenizer, heldout, 1, greedy=True):.3f}")
    model.save_pretrained(arguments.output / "model")
    save_tokenizer(tokenizer, arguments.output / "model")


if __name__ == "__main__":
    main()
