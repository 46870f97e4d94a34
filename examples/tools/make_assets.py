"""Makes what this example ships: `train.jsonl`, `heldout.jsonl` and the warm-started checkpoint in `model/`.

    python examples/tools/make_assets.py

A question such as `a+3b-5.=28` lists the changes of a counter that stands at 28. The model calls `add` or `take` for
each letter in turn, reads the counter's answer, and ends with the last number. As in the quickstart, the warm start is
supervised learning on episodes of mixed quality: some stop too early, some make a wrong call. What reinforcement
learning then does is choose among behaviours that are already there; it teaches no new skill.

It takes about five minutes on one core.
"""

import argparse
import importlib.util
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))
_spec = importlib.util.spec_from_file_location("quickstart_assets", QUICKSTART / "make_assets.py")
assert _spec is not None and _spec.loader is not None
quickstart = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(quickstart)
SEED = 20261128
TRAINING_PROMPTS, HELDOUT_PROMPTS = 256, 200
LONGEST = 8

EARLY_SHARE = 0.35
"""Share of the warm start's episodes that end too early."""
SLIP = 0.1
"""Share of its calls that are wrong."""

MARKS = ["<|tools|>", "<|user|>", "<|tool|>", "<|assistant|>"]
CALL_PARTS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": {"amount": ',
    '{"name": "take", "arguments": {"amount": ',
    "}}",
]
"""Pieces of a call that are one token each: what a tokenizer of a large model does for frequent text."""
TEMPLATE = (
    "{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|end|>{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor %}<|end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, besides the template's marks and the pieces of calls."""
    characters = "\n" + "".join(map(chr, range(32, 127)))
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<|end|>", "<unk>", *characters])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=MARKS,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    made.add_tokens([AddedToken(part, normalized=False) for part in CALL_PARTS])
    made.chat_template = TEMPLATE
    return made


@dataclass(frozen=True)
class Question:
    """A counter's start and its changes."""

    start: int
    changes: tuple[int, ...]

    @property
    def text(self) -> str:
        """The question without the start, which the environment adds: `a+3b-5.`."""
        return "".join(f"{chr(97 + number)}{change:+d}" for number, change in enumerate(self.changes)) + "."

    @property
    def goal(self) -> int:
        """The counter in the end."""
        return self.start + sum(self.changes)

    def row(self) -> dict[str, object]:
        """The row of the data."""
        message = {"role": "user", "content": self.text}
        return {"prompt": [message], "start": self.start, "ground_truth": self.goal}


def draw_question(generator: random.Random) -> Question:
    """A random question, most of them with three to five changes."""
    count = min(max(round(generator.lognormvariate(1.35, 0.45)), 1), LONGEST)
    start = generator.randint(40, 99)
    return Question(start, tuple(generator.choice((-1, 1)) * generator.randint(1, 9) for _ in range(count)))


def draw_episode(generator: random.Random, question: Question) -> list[tuple[str, bool]]:
    """An episode of mixed quality: texts, and whether the model says them."""
    early = generator.randrange(len(question.changes)) if generator.random() < EARLY_SHARE else len(question.changes)
    total = question.start
    parts = [(f"<|tools|>add take <|end|><|user|>{question.text}={total}<|end|><|assistant|>", False)]
    for number, change in enumerate(question.changes[:early]):
        if generator.random() < SLIP:
            change = generator.choice((-change, generator.choice((-1, 1)) * generator.randint(1, 9)))
        total += change
        name = "add" if change > 0 else "take"
        call = (
            f'{chr(97 + number)}<tool_call>{{"name": "{name}", "arguments": {{"amount": {abs(change)}}}}}</tool_call>'
        )
        parts += [(f"{call}<|end|>", True), (f"<|tool|>{total}<|end|><|assistant|>", False)]
    return [*parts, (f"={total}<|end|>", True)]


def draw_batch(
    generator: random.Random, tokenizer: PreTrainedTokenizerFast, unseen: set[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [batch, length], right-padded; labels are −100 where the model does not speak."""
    tokens, labels = [], []
    while len(tokens) < quickstart.BATCH:
        question = draw_question(generator)
        if question.text in unseen:
            continue
        ids: list[int] = []
        learnt: list[int] = []
        for text, said in draw_episode(generator, question):
            new = tokenizer.encode(text, add_special_tokens=False)
            ids += new
            learnt += new if said else [-100] * len(new)
        tokens.append(torch.tensor(ids))
        labels.append(torch.tensor(learnt))
    return (
        torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=tokenizer.pad_token_id),
        torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def main() -> None:
    """Write the data, train, and write the model."""
    parser = argparse.ArgumentParser(description="Make the example's data and checkpoint.")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the warm start")
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(SEED)
    generator = random.Random(SEED)
    questions: dict[str, Question] = {}
    while len(questions) < TRAINING_PROMPTS + HELDOUT_PROMPTS:
        question = draw_question(generator)
        questions.setdefault(question.text, question)
    rows = [question.row() for question in questions.values()]
    arguments.output.mkdir(parents=True, exist_ok=True)
    quickstart.write_rows(arguments.output / "train.jsonl", rows[:TRAINING_PROMPTS])
    quickstart.write_rows(arguments.output / "heldout.jsonl", rows[TRAINING_PROMPTS:])
    tokenizer = make_tokenizer()
    model = quickstart.make_model(tokenizer)
    quickstart.train(model, arguments.steps, lambda step: draw_batch(generator, tokenizer, set(questions)))
    model.save_pretrained(arguments.output / "model")
    quickstart.save_tokenizer(tokenizer, arguments.output / "model")


if __name__ == "__main__":
    main()
