"""The command of a shell script that trains, and its arguments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlhfless_operator.convert.reading.fields import Configuration, Peer, UnreadableConfigurationError
from rlhfless_operator.convert.reading.flags import read_flags
from rlhfless_operator.convert.reading.overrides import is_override, read_overrides
from rlhfless_operator.convert.shell import Command, ShellSyntaxError, Unknowns, evaluate
from rlhfless_operator.convert.shell.values import plain


@dataclass(frozen=True)
class Launch:
    """A command that trains."""

    peer: Peer
    line: int
    before: tuple[str, ...]
    """Its words until the program's name."""
    arguments: tuple[str, ...]


_OPENRLHF = re.compile(r".*openrlhf[./]cli[./]train_ppo(_ray)?(\.py)?")
_TRL = re.compile(r".*trl[./]scripts[./]grpo(\.py)?")
_NO_LAUNCH = ("echo", "printf", "cat", "grep", "sed", "mkdir", "ls", "rm", "cp", "mv", "tee", "git", "pip")
_NO_REINFORCEMENT = re.compile(
    r"verl[./].*(sft_trainer|main_generation|main_eval)|openrlhf[./]cli[./]train_(sft|dpo|rm)"
)
"""Programs of these frameworks that train otherwise, or do not train."""
_PROGRAM = re.compile(r".*\.py|.*main_\w+|.*\.main")


def read_script(path: Path, text: str, peer: Peer | None) -> Configuration | None:
    """Read the command of a shell script that trains; None if there is none.

    Raises:
        UnreadableConfigurationError: it has several, or is no shell script.
    """
    try:
        commands, unknowns, sourced = evaluate(text)
    except ShellSyntaxError as error:
        raise UnreadableConfigurationError(f"{path} can't be read as a shell script ({error})") from error
    found = [launch for command in commands if (launch := _launch(command)) is not None]
    if peer is not None and any(launch.peer != peer for launch in found):
        raise UnreadableConfigurationError(
            f"{path} starts {found[0].peer} in line {found[0].line}, not {peer}; leave out --from"
        )
    different = list({(launch.peer, launch.arguments): launch for launch in found}.values())
    if not different:
        return None
    if len(different) > 1:
        lines = ", ".join(str(launch.line) for launch in different)
        raise UnreadableConfigurationError(
            f"{path} starts {len(different)} trainings (lines {lines}); put the one to convert into a file of its own"
        )
    configuration = _read(different[0], unknowns, path)
    configuration.lost |= dict.fromkeys(
        sourced, "it may set variables of the script, and is not followed: compare the values"
    )
    configuration.lost |= _cut_off(commands, unknowns)
    return configuration


def _launch(command: Command) -> Launch | None:
    words = command.words
    if words[0] in _NO_LAUNCH or any(map(_NO_REINFORCEMENT.search, words)):
        return None
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if _OPENRLHF.fullmatch(word):
            return Launch("openrlhf", command.line, words[:place], rest)
        if _TRL.fullmatch(word) or (word == "grpo" and words[place - 1].rpartition("/")[2] == "trl" and place):
            return Launch("trl", command.line, words[:place], rest)
    if any(map(is_override, words)):
        first = next(place for place, word in enumerate(words) if is_override(word) or word.startswith("--config"))
        return Launch("verl", command.line, words[:first], words[first:]) if first else None
    for place, word in enumerate(words):
        if _PROGRAM.fullmatch(word) and any(_is_of_trl(each) for each in words[place + 1 :]):
            return Launch("trl", command.line, words[:place], words[place + 1 :])
    return None


def _is_of_trl(word: str) -> bool:
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    known = ("config", "num_generations", "reward_funcs", "max_completion_length", "loss_type")
    return word.startswith("--") and name in known


def _cut_off(commands: Sequence[Command], unknowns: Unknowns) -> dict[str, str]:
    """Return fields that stand as a command of their own, and so are not set in the script either."""
    cut = [command for command in commands if is_override(command.words[0]) or command.words[0].startswith("--")]
    return {
        plain(word, unknowns): f"bash does not pass it: a comment, or a missing backslash, ends the command before line"
        f" {command.line}"
        for command in cut
        for word in command.words
    }


def _read(launch: Launch, unknowns: Unknowns, path: Path) -> Configuration:
    if launch.peer == "verl":
        return read_overrides(launch.arguments, unknowns)
    fields, lost = read_flags(launch.arguments, unknowns)
    if launch.peer == "openrlhf":
        return Configuration("openrlhf", fields, lost=lost)
    processes = _processes((*launch.before, *launch.arguments), unknowns, path)
    if "config" in fields:
        file = _beside(path, str(fields.pop("config")))
        content = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
        if not isinstance(content, dict):
            raise UnreadableConfigurationError(f"{file} is not a configuration: it has no fields")
        fields = {**content, **fields}
    named = fields.get("num_processes")
    return Configuration("trl", fields, named if isinstance(named, int) else processes, lost)


def _processes(words: Sequence[str], unknowns: Unknowns, path: Path) -> int | None:
    """Return the number of processes that a launcher starts; None if the command does not say."""
    flags, _ = read_flags(words, unknowns)
    launched = any(word.rpartition("/")[2] in ("accelerate", "torchrun", "trl", "deepspeed") for word in words) or any(
        word.startswith(("accelerate.", "torch.distributed")) for word in words
    )
    if isinstance(number := flags.get("num_processes"), int):
        return number
    if isinstance(each := flags.get("nproc_per_node"), int):
        nodes = flags.get("nnodes", 1)
        return each * nodes if isinstance(nodes, int) else None
    for name in ("config_file", "accelerate_config"):
        try:
            content = yaml.safe_load(_beside(path, str(flags[name])).read_text(encoding="utf-8-sig"))
            return int(content["num_processes"])
        except (KeyError, OSError, TypeError, ValueError, yaml.YAMLError):
            continue
    return None if launched else 1


def _beside(path: Path, name: str) -> Path:
    """Return a file that a script names: relative to its folder, or to one of the folders around it."""
    for folder in (path.absolute().parent, *path.absolute().parents):
        if (folder / name).is_file():
            return folder / name
    raise UnreadableConfigurationError(f"{path} takes its fields from {name}, which is not here; convert that file")
