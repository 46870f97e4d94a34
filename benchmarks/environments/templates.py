"""Prints for each of TRL's chat templates whether an environment's conversation is one sample, or why it is refused.

    python benchmarks/environments/templates.py

Tokens are bytes here: a template's control tokens are found in its text.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rlhfless_functions.environments.bridge import Bridge, BridgeError
from rlhfless_functions.environments.tool_calls import CallParser, check_tools

_CONTROL = re.compile(r"<[|｜][^<>'\"\s]{1,30}[|｜]>|<(?:end_of_turn|start_of_turn|turn\||\|turn)>")
_ENDS = re.compile("end|eot|eom|return|call|turn[|]>")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look around.",
        "parameters": {"type": "object", "properties": {"far": {"type": "integer", "description": "How far."}}},
    },
}


@dataclass(frozen=True)
class Verdict:
    """A template's verdict."""

    name: str
    text: str
    """`one sample`, or why text turns are refused."""
    tools: str
    """The same for tools."""
    rewrites: bool
    """Whether the template itself changes an earlier turn with thoughts once the user speaks again. The sample keeps
    it as it was said."""


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, and of the control tokens that a template names."""
    letters = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    control = sorted(set(_CONTROL.findall(template)))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", additional_special_tokens=control
    )
    tokenizer.chat_template = template
    return tokenizer


def bridge_of(tokenizer: PreTrainedTokenizerFast) -> Bridge:
    """Return the bridge of a template with one tool."""
    ends = [token for token in [*tokenizer.all_special_tokens] if _ENDS.search(token.lower()) or token == "<eos>"]
    return Bridge(tokenizer, [_TOOL], {}, tokenizer.convert_tokens_to_ids(ends))


def judge(name: str, template: str) -> Verdict:
    """Return a template's verdict."""
    tokenizer = tokenizer_of(template)
    bridge = bridge_of(tokenizer)
    found = {"text": "one sample", "tools": "one sample"}
    rewrites = False
    try:
        bridge.after_text(None, "next")
        said = {"role": "assistant", "content": "answer", "reasoning_content": "thought"}
        rewrites = not bridge.keeps_history(said, [{"role": "user", "content": "next"}])
    except BridgeError as error:
        found["text"] = str(error).partition(";")[0]
    try:
        check_tools(bridge, CallParser(tokenizer, [_TOOL], bridge.generation_prompt))
    except BridgeError as error:
        found["tools"] = str(error).partition(";")[0]
    return Verdict(name, found["text"], found["tools"], rewrites)


def templates() -> dict[str, str]:
    """Return TRL's templates by name."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    return {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}


def main() -> None:
    """Print the table."""
    print("| Template | Text turns | Tools | Rewrites thoughts |\n|---|---|---|---|")
    for name, template in templates().items():
        verdict = judge(name, template)
        print(f"| {name} | {verdict.text} | {verdict.tools} | {'yes' if verdict.rewrites else ''} |")


if __name__ == "__main__":
    main()
