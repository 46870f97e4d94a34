"""Early exit: how suited models are to it, and decoding with such drafts.

    rlhfless run examples/quickstart/grpo.yaml
    python benchmarks/drafting/probe.py runs/quickstart-grpo --json FILE

The quickstart's model is probed before training and at the checkpoints of its run, on held-out prompts. Random models
of each family have two layers. The control is a random model of eight layers of which the last six add nothing: the
best case of early exit. All decode on one thread, one sequence at a time; seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.shared.places import QUICKSTART
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.local.probe import make_probe, run_probe
from tests.model.families import FAMILIES, SIZES

CONTROL_LAYERS, CONTROL_WORKING = 8, 2


def measure(models: list[str], prompts: int, **given: Any) -> list[dict[str, Any]]:
    """What `rlhfless probe` says of models, with drafting tried."""
    options: dict[str, Any] = {
        "data": str(QUICKSTART / "heldout.jsonl"), "prompt_column": None, "tokenizer": None, "dtype": "float32",
        "temperature": 1.0, "max_prompt_tokens": 128, "max_tokens": 224, "prompts": prompts, "samples": 1, "seed": 0,
        "agreement": 0.9, "draft": True, "threads": 1,
    }  # fmt: skip
    result = run_probe(make_probe(models, **options | given))
    return [model.model_dump() for model in result.models]


def random_models(root: Path) -> list[str]:
    """Folders of random models, with the quickstart's tokenizer."""
    control = Qwen3Config(**{**SIZES, "num_hidden_layers": CONTROL_LAYERS}, head_dim=32, tie_word_embeddings=True)
    folders = []
    for name, config in {**FAMILIES, "control": control}.items():
        folder = root / name.replace(",", "").replace(" ", "-")
        torch.manual_seed(0)
        config.max_position_embeddings = 512
        if getattr(config, "original_max_position_embeddings", None):
            config.original_max_position_embeddings = 512
        model = AutoModelForCausalLM.from_config(config)
        if name == "control":
            with torch.no_grad():
                for layer in model.model.layers[CONTROL_WORKING:]:
                    layer.self_attn.o_proj.weight.zero_()
                    layer.mlp.down_proj.weight.zero_()
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(QUICKSTART / "model" / file, folder / file)
        folders.append(str(folder))
    return folders


def main() -> None:
    """Measure, print, and write the result where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a finished quickstart")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        **described_run(["torch", "transformers"]),
        "quickstart": measure([given.run], given.prompts),
    }
    with tempfile.TemporaryDirectory() as root:
        result["random"] = measure(random_models(Path(root)), max(1, given.prompts // 4), max_tokens=64)
    for model in result["random"]:
        model["name"] = Path(model["name"]).name
    write_record(result, given.json)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
