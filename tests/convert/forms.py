"""Configurations in the forms that people publish, made from tables: `python -m tests.convert.forms` writes their page.

Each form is a way to write fields down, and the fields are drawn from a table of the framework's own names. The values
are ours; the syntax is that of TRL's recipes, commands and Python scripts, verl's scripts and YAML, and OpenRLHF's
commands.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from rlhfless_operator.convert import convert, job_yaml, read_configuration
from rlhfless_operator.convert.conversion import Conversion, Left, Unneeded
from rlhfless_operator.job.reading.validation import parse_job
from tests.convert.form_tables import OPENRLHF, TRL, VERL

PAGE = Path(__file__).resolve().parents[2] / "docs" / "converted-forms.md"

FIRST = 4
"""Fields that each configuration has: the first ones of its table."""


def fields(table: dict[str, list[Any]], random: Random) -> dict[str, Any]:
    """Draw fields and their values."""
    names = list(table)
    chosen = {*names[:FIRST], *random.sample(names, random.randint(8, len(names) - 4))}
    return {name: random.choice(values) for name, values in table.items() if name in chosen}


# --- the forms ---


def _word(value: Any) -> str:
    text = str(value)
    return f'"{text}"' if any(letter in text for letter in "[]' ,{}") else text


def _flag(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    if isinstance(value, list):
        return f"--{name} {' '.join(map(_word, value))}"
    return f"--{name} {_quoted(value)}"


def _quoted(value: Any) -> str:
    return (
        "'" + str(value).replace("'", '"') + "'"
        if isinstance(value, dict | str) and "$" not in str(value)
        else _word(value)
    )


def recipe(given: dict[str, Any], random: Random) -> str:
    """Write YAML as `trl grpo --config` takes it."""
    return "# A recipe\n" + yaml.safe_dump(given, sort_keys=False)


def accelerate(given: dict[str, Any], random: Random) -> str:
    """Write `accelerate launch ... trl grpo --flags`."""
    launcher = random.choice(
        [
            "accelerate launch --num_processes 4 train_grpo.py",
            "trl grpo",
            "torchrun --nproc_per_node=2 -m trl.scripts.grpo",
            "CUDA_VISIBLE_DEVICES=0 python train_grpo.py",
        ]
    )
    flags = [_flag(name, value) for name, value in {"num_generations": 8, **given}.items() if value is not False]
    return "#!/bin/bash\nset -e\n" + " \\\n    ".join([launcher, *flags]) + "\n"


def python(given: dict[str, Any], random: Random) -> str:
    """Write a Python script with `GRPOConfig(...)`."""
    own = (
        "model_name_or_path",
        "dataset_name",
        "reward_funcs",
        "use_peft",
        "lora_r",
        "system_prompt",
        "dataset_prompt_column",
        "dataset_config",
        "dataset_mixture",
    )
    arguments = ",\n    ".join(f"{name}={value!r}" for name, value in given.items() if name not in own)
    peft = f"peft_config=LoraConfig(r={given.get('lora_r', 16)}), " if given.get("use_peft") else ""
    return f"""\
from datasets import concatenate_datasets, load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

MODEL = {given["model_name_or_path"]!r}


def brevity(completions, **kwargs):
    return [-len(each) for each in completions]


config = GRPOConfig(
    {arguments},
)
train = {_loading(given)}
trainer = GRPOTrainer(model=MODEL, reward_funcs=[accuracy_reward, brevity], args=config, {peft}train_dataset=train)
trainer.train()
"""


def _loading(given: dict[str, Any]) -> str:
    """Write the expression that loads the data."""
    subset = f", {given['dataset_config']!r}" if "dataset_config" in given else ""
    load = f'load_dataset({given["dataset_name"]!r}{subset}, split="train")'
    if "dataset_mixture" in given:
        return f'concatenate_datasets([{load}, load_dataset("json", data_files="more.jsonl", split="train")])'
    return f"{load}.map(turned)" if "dataset_prompt_column" in given else load


def overrides(given: dict[str, Any], random: Random) -> str:
    """Write verl's overrides on a command line."""
    words = [f"{name}={_word(value)}" for name, value in given.items()]
    return "set -x\npython3 -m verl.trainer.main_ppo \\\n    " + " \\\n    ".join(words) + " $@\n"


def variables(given: dict[str, Any], random: Random) -> str:
    """Write verl's overrides with variables, defaults and arithmetic, as DAPO's scripts have them."""
    lines, words = ["#!/usr/bin/env bash", "set -xeuo pipefail"], []
    for number, (name, value) in enumerate(given.items()):
        variable = f"v{number}"
        if isinstance(value, int) and not isinstance(value, bool) and value % 2 == 0 and value > 2:
            lines.append(f"{variable}=$(({value // 2} * 2))")
        elif isinstance(value, str) and "'" not in value:
            lines.append(f'{variable.upper()}=${{{variable.upper()}:-"{value}"}}')
            variable = variable.upper()
        else:
            lines.append(f"{variable}={_word(value)}")
        words.append(f'{name}="${{{variable}}}"')
    return "\n".join([*lines, "python3 -m verl.trainer.main_ppo \\", "    " + " \\\n    ".join(words), ""])


def blocks(given: dict[str, Any], random: Random) -> str:
    """Write verl's overrides in blocks of text and an array."""
    words = [f"{name}={value}" for name, value in given.items() if "'" not in str(value)]
    lists = [f'{name}="{value}"' for name, value in given.items() if "'" in str(value)]
    half = len(words) // 2
    text = " \\\n  ".join(words[:half])
    array = "\n  ".join([*words[half:], *lists])
    script = [
        "#!/bin/bash",
        f'A="{text}"',
        f"B=(\n  {array}\n)",
        'if [ -n "$DEBUG" ]; then B+=(trainer.val_only=True); fi',
        'python3 -m verl.trainer.main_ppo $A "${B[@]}"',
    ]
    return "\n".join([*script, ""])


def nested(given: dict[str, Any], random: Random) -> str:
    """Write verl's YAML."""
    content: dict[str, Any] = {}
    for name, value in given.items():
        *parents, last = name.split(".")
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        text = value.replace("$HOME", "~") if isinstance(value, str) else value
        place[last] = yaml.safe_load(text) if isinstance(text, str) and text.startswith("[") else text
    return yaml.safe_dump(content)


def ray(given: dict[str, Any], random: Random) -> str:
    """Write OpenRLHF's command line."""
    submit = random.choice(
        ['ray job submit --runtime-env-json=\'{"working_dir": "/w"}\' -- ', "", "deepspeed --module "]
    )
    program = "python3 -m openrlhf.cli.train_ppo_ray" if "deepspeed" not in submit else "openrlhf.cli.train_ppo_ray"
    flags = [_flag(name, value) for name, value in given.items()]
    return "set -x\n\n" + " \\\n   ".join([submit + program, *flags]) + "\n"


@dataclass(frozen=True)
class Form:
    """A way to write a configuration."""

    name: str
    file: str
    table: dict[str, list[Any]]
    write: Callable[[dict[str, Any], Random], str]


FORMS = (
    Form("TRL: a recipe in YAML", "recipe.yaml", TRL, recipe),
    Form("TRL: a command", "train.sh", TRL, accelerate),
    Form("TRL: a Python script", "train.py", TRL, python),
    Form("verl: overrides", "run.sh", VERL, overrides),
    Form("verl: variables and arithmetic", "run.sh", VERL, variables),
    Form("verl: blocks and arrays", "run.sh", VERL, blocks),
    Form("verl: YAML", "ppo.yaml", VERL, nested),
    Form("OpenRLHF: a command", "ppo.sh", OPENRLHF, ray),
)

OF_EACH = 25
"""Configurations of each form: 200 in all."""


def text_of(form: Form, seed: int) -> tuple[dict[str, Any], str]:
    """Return the fields of a configuration, and its text."""
    random = Random(seed)
    given = fields(form.table, random)
    return given, form.write(given, random)


def converted(form: Form, text: str, folder: Path) -> Conversion:
    """Convert a configuration."""
    path = folder / form.file
    path.write_text(text)
    return convert(read_configuration(path), form.file)


def checked() -> Iterator[tuple[Form, int, Conversion]]:
    """Convert all configurations, and check that each job validates."""
    with TemporaryDirectory() as folder:
        for form, seed in itertools.product(FORMS, range(OF_EACH)):
            conversion = converted(form, text_of(form, seed)[1], Path(folder))
            parse_job(job_yaml(conversion))
            yield form, seed, conversion


def kind(outcome: Any) -> str:
    """Return the column of the page that a result counts in."""
    if isinstance(outcome, Left):
        return "decide" if outcome.values else "lost"
    return "without effect" if isinstance(outcome, Unneeded) else "mapped"


def page() -> str:
    """Return the page of the forms."""
    counts: dict[str, Counter[str]] = {form.name: Counter() for form in FORMS}
    for form, _, conversion in checked():
        lines = [line for line in conversion.lines if line.given]
        counts[form.name] += Counter(kind(line.outcome) for line in lines)
        counts[form.name]["lost"] += len(conversion.lost)
    rows = [
        f"| {name} | {OF_EACH} | "
        + " | ".join(str(count[each]) for each in ("mapped", "without effect", "decide", "lost"))
        + " |"
        for name, count in counts.items()
    ]
    return "\n".join([_HEAD, *rows, ""])


_HEAD = f"""\
<!-- Made by python -m tests.convert.forms; do not edit. -->

# Converted forms

The tests convert {len(FORMS) * OF_EACH} configurations, {OF_EACH} in each form that people publish, and each job
validates. Fields and values are drawn from tables of the frameworks' names. [From TRL, verl or OpenRLHF](converting.md)
says what `convert` does.

- **Mapped**: the job has the field's value, under its own name.
- **Without effect**: the field makes no difference to what is learnt, or another line has it as a part. The reason is
  printed.
- **Decide**: the job has another value, marked with `!` and the reason.
- **Lost**: the job has nothing for it, marked with `!` and the reason.

| Form | Configurations | Mapped | Without effect | Decide | Lost |
|---|---|---|---|---|---|"""


if __name__ == "__main__":
    PAGE.write_text(page())
