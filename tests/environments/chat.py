"""A small tokenizer with a chat template, and conversations with an environment as generation has them."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhfless_functions.environments.bridge import Bridge
from rlhfless_functions.environments.episodes import Observation, Turn
from rlhfless_functions.environments.host import EpisodeHost
from rlhfless_functions.environments.playing import PlayedEpisodes
from rlhfless_functions.environments.sessions import Host
from rlhfless_functions.environments.tool_calls import CallParser
from rlhfless_functions.settings import EnvironmentSettings, PythonEnvironment

MARKS = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str = TEMPLATE, special: tuple[str, ...] = MARKS) -> PreTrainedTokenizerBase:
    """One token a byte, besides the special tokens; the first of these that ends a turn is the end of sequence."""
    letters = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = "<|im_end|>" if "<|im_end|>" in special else "<eos>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, additional_special_tokens=[each for each in special if each != end]
    )
    tokenizer.chat_template = template
    return tokenizer


def settings_of(file: Path, name: str | None = "Env", **given: Any) -> EnvironmentSettings:
    """The settings of a class in a file."""
    python = None if name is None else PythonEnvironment(file=str(file), class_name=name)
    return EnvironmentSettings(python=python, **given)


class Play:
    """Plays one sample as generation does: appends what is sampled and what is given, and keeps the spans."""

    def __init__(self, settings: EnvironmentSettings, room: int = 4000, host: Host | None = None) -> None:
        self.tokenizer = make_tokenizer()
        self.host: Host = host or EpisodeHost(settings)
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._settings = settings
        self._room = room
        self.response: list[int] = []
        self.given: list[tuple[int, int]] = []
        self.row: dict[str, Any] = {"prompt": [{"role": "user", "content": "Go."}]}
        self.episodes = self.make()

    def make(self, actors: int = 1) -> PlayedEpisodes:
        """Another actor's environments."""
        stop = [self.end]
        bridge = Bridge(self.tokenizer, self.host.schemas, {}, stop)
        parser = CallParser(self.tokenizer, self.host.schemas, bridge.generation_prompt)
        return PlayedEpisodes(self._settings, lambda: self.host, bridge, parser, self.tokenizer, stop, actors)

    def submit(self, *, truncated: bool = False) -> Observation:
        """Hand the response over and wait for the observation."""
        room = 0 if truncated else self._room - len(self.response)
        turn = Turn((7, 1), self.row, list(self.response), list(self.given), seed=3, truncated=truncated, room=room)
        self.episodes.submit(turn)
        (seen,) = self.episodes.ready(300)
        if seen.restarted:
            self.response, self.given = [], []
        if seen.tokens:
            self.given.append((len(self.response), len(self.response) + len(seen.tokens)))
            self.response += seen.tokens
        return seen

    def say(self, text: str, *, truncated: bool = False) -> Observation:
        """Sample a turn."""
        self.response += [*self.tokenizer.encode(text), *([] if truncated else [self.end])]
        return self.submit(truncated=truncated)

    def call(self, name: str, arguments: str = "{}") -> Observation:
        """Sample a call of a tool."""
        return self.say(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')

    def text(self, seen: Observation) -> str:
        """The text of an observation."""
        return str(self.tokenizer.decode(list(seen.tokens)))

    def close(self) -> None:
        """End everything."""
        self.episodes.close()
        self.host.close()
