"""Let a trained model answer a prompt, for `rlhfless sample`."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlhfless_functions import artifacts
from rlhfless_functions.api import PROMPTING, Prompting
from rlhfless_functions.data.chats import ChatError, PromptForm, prompt_tokens, read_prompt, render
from rlhfless_functions.generation.engines.transformers import eos_token_ids


def sample(model_uri: str, prompt: str, *, count: int, temperature: float, max_tokens: int, seed: int) -> list[str]:
    """Return responses to one prompt, as text.

    The prompt is made as training made its own (`prompting.json` in the folder), and responses end as they did there.

    Args:
        model_uri: a Hugging Face folder, such as an exported run's.
        prompt: text, or a JSON list of chat messages. If the model was trained on chats, text is one user message.
        count: number of responses.
        temperature: 0 takes the likeliest token each time.
        max_tokens: longest response.
        seed: seed of the sampler.

    Raises:
        ChatError: the prompt can't be read.
    """
    folder = artifacts.local_folder(model_uri, published=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompting = _prompting(folder, tokenizer)
    tokens = torch.tensor([_tokens(tokenizer, prompt, prompting)] * count)
    ends = sorted(eos_token_ids(model, tokenizer))
    choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    # Settings of the model's own, such as a repetition penalty, would give other responses than those of training.
    model.generation_config = GenerationConfig(
        max_new_tokens=max_tokens,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ends), None),
        stop_strings=prompting.stop or None,
        **(choice if temperature else {"do_sample": False}),
    )
    torch.manual_seed(seed)
    stops = {"tokenizer": tokenizer} if prompting.stop else {}
    outputs = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **stops)
    return list(tokenizer.batch_decode(outputs[:, tokens.shape[1] :], skip_special_tokens=True))


def _prompting(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Prompting:
    """Return how the model was prompted in training; for a model from elsewhere, in its template if it has one."""
    if (folder / PROMPTING).is_file():
        return Prompting.model_validate_json((folder / PROMPTING).read_bytes())
    return Prompting(chat=bool(tokenizer.chat_template))


def _tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, prompting: Prompting) -> list[int]:
    form = PromptForm(prompting.system_prompt, prompting.chat_template_kwargs)
    conversation = read_prompt(prompt, form)
    if prompting.chat and conversation.messages is None:
        conversation = read_prompt([{"role": "user", "content": prompt}], form)
    (tokens,) = prompt_tokens(tokenizer, [render(tokenizer, conversation)], [conversation.messages is None])
    return tokens


def main() -> None:
    """Run with the arguments MODEL PROMPT COUNT TEMPERATURE MAX_TOKENS SEED."""
    transformers_logging.disable_progress_bar()
    model_uri, prompt, count, temperature, max_tokens, seed = sys.argv[1:]
    numbers = {"count": int(count), "max_tokens": int(max_tokens), "seed": int(seed)}
    try:
        responses = sample(model_uri, prompt, temperature=float(temperature), **numbers)
    except ChatError as error:
        sys.exit(f"error: the prompt {error}")
    for response in responses:
        print(response)


if __name__ == "__main__":
    main()
