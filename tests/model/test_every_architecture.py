"""Every causal language model of transformers that can be built small: each pass is right, or refused with the reason.

    python -m tests.model.test_every_architecture

prints the table of docs/correctness.md. Each is a random model whose distributions depend on the context, with windows
shorter than its samples. Its own forward pass, one sample at a time, says what is right.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from rlhfless_functions.generation.engines import trial
from rlhfless_functions.generation.engines.attention import Masks, use_grouped_attention
from rlhfless_functions.model.forward import collate, collate_responses, response_log_probs
from rlhfless_functions.model.packed_attention import can_pack, use_packing
from rlhfless_functions.model.shared_prompts import SharedPrompts, can_share_prompts
from rlhfless_functions.model.trial import check_passes
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights.support import check_supported, kernels

VOCABULARY, WINDOW, MOST_PARAMETERS = 72, 8, 20_000_000
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("head_dim", "rotary_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "attention_head_dim", "mamba_d_head", "expand_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_layer_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_group_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "attention_chunk_size"), WINDOW),
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
PROMPTS = [
    [(7 * place * place + 3 * place + row) % (VOCABULARY - 3) + 3 for place in range(n)] for row, n in ((1, 25), (2, 4))
]
OF_PROMPT = [0, 1, 0]
RESPONSES = [
    [(5 * place + 11 * row * place * place + row) % (VOCABULARY - 3) + 3 for place in range(n)]
    for row, n in ((1, 12), (2, 3), (3, 7))
]
CLOSE = 2e-3
"""Nats: largest difference of log-probabilities in float32."""


OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
}
"""What else an architecture needs to be small."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (ALiBi)": ("falcon", {"alibi": True}),
    "qwen2 (window that no layer uses)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen2 (window in one layer)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma3_text (full layers)": ("gemma3_text", {"layer_types": ["full_attention"] * 2}),
}
"""Other settings of an architecture that change its passes."""


def small_config(kind: str) -> PreTrainedConfig:
    """Return a small configuration: what of `SMALL` the architecture has, and its own values otherwise.

    If it can't be built so, some name means something else there, and keeps its own value.
    """
    base, more = VARIANTS.get(kind, (kind, OWN.get(kind, {})))
    made = CONFIG_MAPPING[base]
    default, attributes = vars(made()), getattr(made, "attribute_map", {})
    known = {name: value for name, value in SMALL.items() if name in default or name in attributes}
    given = {name: value for name, value in known.items() if default.get(attributes.get(name, name)) is not None}
    problem = ValueError("it stays large")
    for names in (given, known):
        for left_out in ("", "head_dim", "sliding_window", *names):
            kept = {name: value for name, value in names.items() if name != left_out}
            try:
                config = made(**{**kept, **more})
                if is_small(config):
                    return config
            except Exception as error:
                problem = ValueError(f"{type(error).__name__}: {error}")
    raise problem


def is_small(config: PreTrainedConfig) -> bool:
    """Return whether a model of few parameters can be built and computed.

    Raises:
        Exception: it can't.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        return False
    with suppress(TaskError):
        check_supported(config, "it")
        with torch.no_grad():
            AutoModelForCausalLM.from_config(config).eval()(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False)
    return True


def expected(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return log-probabilities of each response by the model's own pass."""
    found = []
    for number, response in zip(OF_PROMPT, RESPONSES, strict=True):
        prompt = PROMPTS[number]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].float()
        found.append(logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return found


def is_right(log_probs: torch.Tensor, own: list[torch.Tensor]) -> bool:
    return all((row[: len(each)] - each).abs().max() < CLOSE for row, each in zip(log_probs, own, strict=True))


def verdicts(kind: str) -> dict[str, str]:
    """Return the verdict on each pass of an architecture: `right`, `plain`, `wrong`, or the reason of a refusal."""
    try:
        config = small_config(kind)
    except Exception as error:
        return {"built": str(error).strip().split("\n")[0][:80] or type(error).__name__}
    try:
        check_supported(config, "it")
    except TaskError as error:
        return {"all": reason(error)}
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, **kernels(config)).eval()
        own = expected(model)
    except Exception as error:
        return {"built": f"{type(error).__name__}: {error}".split("\n")[0][:80]}
    body = model.base_model
    found: dict[str, str] = {}
    try:
        check_passes(model, "it")
    except TaskError as error:
        found["padded"] = reason(error)
    else:
        prompts = [PROMPTS[number] for number in OF_PROMPT]
        with torch.no_grad():
            ours, _ = response_log_probs(model, collate(prompts, RESPONSES, 0), 1.0)
            found["padded"] = "right" if is_right(ours, own) else "wrong"
            if can_share_prompts(body):
                shared = SharedPrompts(body, PROMPTS)
                ours, _ = response_log_probs(model, collate_responses(OF_PROMPT, RESPONSES, 0), 1.0, prompts=shared)
                found["shared"] = "right" if is_right(ours, own) else "wrong"
            else:
                found["shared"] = "plain"
            if can_pack(body):
                use_packing(body, True)
                ours, _ = response_log_probs(model, collate(prompts, RESPONSES, 0, packed=True), 1.0)
                use_packing(body, False)
                found["packed"] = "right" if is_right(ours, own) else "wrong"
            else:
                found["packed"] = "plain"
    found["engine"] = of_engine(model)
    return found


def of_engine(model: PreTrainedModel) -> str:
    try:
        use_grouped_attention(model)
        masks = Masks(model.config.get_text_config())
        trial.check_engine(model, masks, "it")
    except TaskError as error:
        return reason(error)
    samples = [PROMPTS[number] + response for number, response in zip(OF_PROMPT, RESPONSES, strict=True)]
    with torch.inference_mode():
        ours = trial._decoded(model, masks, samples)
        model.set_attn_implementation("sdpa")
        own = torch.stack([trial._own(model, sample) for sample in samples])
    return "right" if (ours.log_softmax(-1) - own.log_softmax(-1)).abs().max() < CLOSE else "wrong"


def reason(error: TaskError) -> str:
    """The reason of a refusal, without the names."""
    text = str(error)
    for found, short in (
        ("more than text", "reads more than text"),
        ("no causal language model", "no causal decoder"),
        ("encoder-decoder", "encoder and decoder"),
        ("layers of kind", "has layers that are no attention over keys and values"),
        ("scaled dot-product attention", "has no scaled dot-product attention"),
        ("can't generate with", "takes other arguments than the engine's"),
        ("computes other logits", "the engine would compute other logits"),
        ("other numbers", "padding would change its numbers"),
        ("changes its logits", "changes its logits after the head"),
        ("can't be computed", "can't be passed as a decoder"),
    ):
        if found in text:
            return short
    return text


def architectures() -> list[str]:
    kinds = [kind for kind, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING]
    return sorted([*kinds, *VARIANTS])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Looking them up imports every configuration of transformers.
    marks = metafunc.config.option.markexpr or ""
    wanted = "nightly" in marks.replace("not nightly", "")
    metafunc.parametrize("kind", architectures() if wanted else [])


@pytest.mark.nightly
def test_every_pass_is_right_or_refused(kind: str) -> None:
    found = verdicts(kind)
    assert "wrong" not in found.values(), found


def summary(found: dict[str, str]) -> tuple[str, str]:
    """The row and the reason of an architecture in the table."""
    if "built" in found:
        return "not built small", ""
    if "all" in found:
        return "refused", found["all"]
    if "wrong" in found.values():
        return "WRONG", str(found)
    if found["padded"] != "right":
        return "refused", found["padded"]
    if found["engine"] != "right":
        return "learns, and the transformers engine refuses it", found["engine"]
    if found["shared"] != "right":
        return "right, and each sample is computed whole", ""
    return "right", "" if found["packed"] == "right" else "packed rows are padded"


def table() -> Iterator[str]:
    rows = defaultdict(list)
    for kind in architectures():
        try:
            rows[summary(verdicts(kind))].append(kind)
        except Exception as error:
            rows["ERROR", f"{type(error).__name__}: {error}".split("\n")[0]].append(kind)
    yield "| Result | Why | Number | Architectures (`model_type`) |"
    yield "|---|---|---|---|"
    for (result, why), kinds in sorted(rows.items(), key=lambda row: (row[0][0] != "right", *row[0])):
        yield f"| {result} | {why} | {len(kinds)} | {', '.join(kinds)} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("\n".join(table()))
