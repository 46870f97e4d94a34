"""Let a trained model answer a prompt, for `rlhfless sample`."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rlhfless_functions import artifacts


def sample(model_uri: str, prompt: str, *, count: int, temperature: float, max_tokens: int, seed: int) -> list[str]:
    """Return responses to one prompt, as text.

    Args:
        model_uri: a Hugging Face folder, such as an exported run's.
        prompt: text; with a chat template it is one user message.
        count: number of responses.
        temperature: 0 takes the likeliest token each time.
        max_tokens: longest response.
        seed: seed of the sampler.
    """
    folder = artifacts.local_folder(model_uri, published=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer([prompt] * count, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
    torch.manual_seed(seed)
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    outputs = model.generate(**inputs, max_new_tokens=max_tokens, **(choice if temperature else {"do_sample": False}))
    return list(tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Run with the arguments MODEL PROMPT COUNT TEMPERATURE MAX_TOKENS SEED."""
    transformers_logging.disable_progress_bar()
    model_uri, prompt, count, temperature, max_tokens, seed = sys.argv[1:]
    responses = sample(
        model_uri, prompt, count=int(count), temperature=float(temperature), max_tokens=int(max_tokens), seed=int(seed)
    )
    for response in responses:
        print(response)


if __name__ == "__main__":
    main()
