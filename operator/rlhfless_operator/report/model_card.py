"""The README.md of a trained model: what it is, and how it was trained."""

import json
from collections.abc import Mapping
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml

from rlhfless_functions.api import Prompting
from rlhfless_functions.settings import AlgorithmSettings, RewardSettings
from rlhfless_operator.formatting import format_clock, format_money
from rlhfless_operator.job.paths import is_uri
from rlhfless_operator.job.redaction import redacted, without_credentials
from rlhfless_operator.job.spec import RLHFJob

_ALGORITHMS = {
    "ppo": ("PPO", "1707.06347"),
    "grpo": ("GRPO", "2402.03300"),
    "rloo": ("RLOO", "2402.14740"),
    "reinforce_plus_plus": ("REINFORCE++", "2501.03262"),
    "dr_grpo": ("Dr. GRPO", "2503.20783"),
    "dapo": ("DAPO", "2503.14476"),
    "gspo": ("GSPO", "2507.18071"),
    "cispo": ("CISPO", "2506.13585"),
    "gmpo": ("GMPO", "2507.20673"),
    "sapo": ("SAPO", "2511.20347"),
}


def model_card(job: RLHFJob, summary: Mapping[str, Any], prompting: Prompting | None = None) -> str:
    """Write the card in Markdown with YAML front matter, as the Hugging Face hub reads it.

    Args:
        job: the job as it ran.
        summary: the known results, under the names of `summary.json`; missing ones are omitted. `total_steps` may be
            there too: the steps of the whole job.
        prompting: what training put around its prompts.
    """
    spec = job.spec
    name, paper = _ALGORITHMS[spec.algorithm.name]
    base = shown_source(spec.model.source)
    adapter = spec.model.lora is not None and spec.model.lora.export == "adapter"
    library, loader = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    front: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["rlhfless", "reinforcement-learning", spec.algorithm.name.replace("_", "-")],
    }
    if _is_hub_name(spec.model.source):
        front["base_model"] = spec.model.source
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {job.metadata.name}\n\n`{base}`, trained with {name} ([arXiv {paper}](https://arxiv.org/abs/{paper}))"
        f" by {_release()}.",
        _table("Results", _results(summary)),
        _table("Training", _training(job, summary)),
        f"## Use\n\n```python\nfrom {library} import {loader}\nfrom transformers import AutoTokenizer\n\n"
        f'model = {loader}.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```' + _prompts(prompting),
        "## Job\n\nThe document that trained it, with paths shortened to their last part:\n\n"
        f"```yaml\n{_document(job)}```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _prompts(prompting: Prompting | None) -> str:
    """Show how to make a prompt as training did."""
    if prompting is None:
        return ""
    if prompting.chat:
        system = [{"role": "system", "content": prompting.system_prompt}] if prompting.system_prompt is not None else []
        messages = f"{json.dumps(system, ensure_ascii=False)[:-1]}{', ' if system else ''}"
        messages += '{"role": "user", "content": "…"}]'
        arguments = "".join(f", {name}={value!r}" for name, value in prompting.chat_template_kwargs.items())
        code = (
            f"messages = {messages}\ninputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True,"
            f' return_dict=True, return_tensors="pt"{arguments})'
        )
    else:
        code = 'inputs = tokenizer("…", return_tensors="pt")  # plain text: training used no chat template'
    ended = f"stop_strings={prompting.stop!r}, tokenizer=tokenizer, " if prompting.stop else ""
    generate = f"outputs = model.generate(**inputs, {ended}do_sample=True, top_k=0, top_p=1.0, max_new_tokens=256)"
    return f"\n\nTraining made its prompts so:\n\n```python\n{code}\n{generate}\n```"


def _release() -> str:
    """Return `rlhfless` with its version; without a version if it runs from its sources and is not installed."""
    try:
        return f"rlhfless {version('rlhfless')}"
    except PackageNotFoundError:
        return "rlhfless"


def shown_source(source: str) -> str:
    """Return a source as strangers may see it: a hub name or URI, or the last part of a local path."""
    if _is_hub_name(source) or is_uri(source):
        return without_credentials(source)
    return source.rstrip("/").rpartition("/")[2]


def _is_hub_name(source: str) -> bool:
    return not source.startswith((".", "/", "~")) and "://" not in source and source.count("/") <= 1


def _results(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for label, first, last, form in (
        ("Held-out reward", "held_out_reward_before", "held_out_reward_after", "{:.3f} before, {:.3f} after"),
        ("Mean reward", "reward_first", "reward_last", "{:.3f} in the first step, {:.3f} in the last"),
    ):
        if summary.get(first) is not None and summary.get(last) is not None:
            rows.append((label, form.format(summary[first], summary[last])))
    if summary.get("seconds") is not None:
        rows.append(("Time", format_clock(float(summary["seconds"]))))
    if summary.get("instance_seconds") is not None:
        rows.append(("Instance time", f"{float(summary['instance_seconds']):,.0f} s"))
    if summary.get("cost") is not None:
        rows.append(("Cost", format_money(Decimal(str(summary["cost"])), str(summary.get("currency", "USD")))))
    return rows


def _training(job: RLHFJob, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    spec = job.spec
    algorithm = spec.algorithm.resolved()
    kl = algorithm.kl
    batch, optimizer = spec.batch, spec.optimizer
    steps = summary.get("steps") or spec.steps
    rows = [
        ("Advantage", f"{algorithm.advantage}, normalised by {algorithm.advantage_normalization}"),
        (
            "Objective",
            f"{_clip(algorithm)}, {algorithm.ratio_level} ratio,"
            f" {algorithm.aggregation}, {algorithm.epochs} epoch{'s' if algorithm.epochs > 1 else ''} a step",
        ),
        (
            "KL penalty",
            f"{kl.coefficient:g}, {kl.estimator} in the {kl.placement}" if kl and kl.coefficient else "none",
        ),
        ("Rewards", "; ".join(_reward(reward) for reward in spec.rewards)),
        ("Data", ", ".join(shown_source(part.source) for part in spec.data.parts)),
        (
            "Sampling",
            f"temperature {spec.sampling.temperature:g}, at most {spec.sampling.max_response_tokens} tokens",
        ),
        ("Batch", f"{batch.prompts_per_step} prompts × {batch.samples_per_prompt} samples a step"),
        (
            "Optimizer",
            f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule} schedule,"
            f" {optimizer.warmup_steps} warm-up steps",
        ),
        ("Steps", _steps(summary, steps) if steps else f"{spec.epochs} epochs"),
        ("Seed", str(spec.seed)),
    ]
    if spec.model.lora:
        rows.insert(0, ("Adapter", f"LoRA, rank {spec.model.lora.rank}, alpha {spec.model.lora.alpha:g}"))
    return rows


def _steps(summary: Mapping[str, Any], steps: int) -> str:
    total = summary.get("total_steps") or steps
    return f"{steps} of {total}: the weights are those of a run that has not ended" if steps < total else str(steps)


def _clip(algorithm: AlgorithmSettings) -> str:
    if algorithm.clip_low is None or algorithm.clip_high is None:
        return f"{algorithm.clip} gate"
    return f"{algorithm.clip} clip −{algorithm.clip_low:g} / +{algorithm.clip_high:g}"


def _reward(reward: RewardSettings) -> str:
    return f"{reward.name} ({reward.kind}, weight {reward.weight:g})"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = "\n".join(f"| {label} | {_cell(value)} |" for label, value in rows)
    return f"## {title}\n\n| | |\n|---|---|\n{lines}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _document(job: RLHFJob) -> str:
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return yaml.safe_dump(_shortened(redacted(document)), sort_keys=False, allow_unicode=True)


def _shortened(value: Any) -> Any:
    """Return the document without this machine's paths."""
    if isinstance(value, dict):
        return {key: _shortened(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_shortened(child) for child in value]
    return shown_source(value) if isinstance(value, str) and value.startswith(("/", "~/")) else value
