"""Read a file, and detect the framework whose configuration it is."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml

from rlhfless_operator.convert.reading.fields import Configuration, Peer, UnreadableConfigurationError, load_yaml
from rlhfless_operator.convert.reading.launches import read_script
from rlhfless_operator.convert.reading.overrides import flat
from rlhfless_operator.convert.reading.python_script import read_python
from rlhfless_operator.convert.trl import ROWS

_VERL_SECTIONS = {"actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function"}
_OF_GRPO = {"num_generations", "max_completion_length", "reward_funcs", "reward_weights", "scale_rewards"}
_OF_OTHER_TRAININGS = {
    "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_length", "max_seq_length", "packing",
    "padding_free", "precompute_ref_log_probs", "desirable_weight", "max_new_tokens", "response_length",
}  # fmt: skip
"""Fields of supervised and preference training, and of TRL's former PPO."""


def read_configuration(path: Path, peer: Peer | None = None) -> Configuration:
    """Read a peer's configuration.

    Args:
        path: YAML, a shell script that starts a training, or a Python script with `GRPOConfig(...)`.
        peer: the peer; None detects it.

    Raises:
        UnreadableConfigurationError: the file is none of these.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableConfigurationError(f"{path} can't be read ({error}); name a configuration file") from error
    if path.suffix == ".py":
        return read_python(path, text)
    if path.suffix not in (".yaml", ".yml"):
        if (found := read_script(path, text, peer)) is not None:
            return found
        if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
            raise UnreadableConfigurationError(
                f"{path} starts no training that is known: verl with overrides, trl grpo, a script with --config, or"
                " openrlhf.cli.train_ppo_ray"
            )
    return _read_yaml(path, text, peer)


def _read_yaml(path: Path, text: str, peer: Peer | None) -> Configuration:
    try:
        content = yaml.safe_load(text)
        if isinstance(content, dict) and peer != "trl" and (peer == "verl" or _is_of_verl(content)):
            return Configuration("verl", dict(flat(load_yaml(text))))
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise UnreadableConfigurationError(f"{path} is not YAML ({problem}); check its indentation") from error
    if not isinstance(content, dict) or not content:
        raise UnreadableConfigurationError(f"{path} is not a configuration: it has no fields")
    content = {str(name): value for name, value in content.items()}
    if content.get("kind") == "RLHFJob":
        raise UnreadableConfigurationError(f"{path} is a job already; check it with rlhfless validate {path}")
    if peer == "openrlhf":
        return Configuration("openrlhf", dict(flat(content)))
    if peer is None:
        _check_of_trl(path, content.keys())
    processes = content.get("num_processes")
    return Configuration("trl", content, processes if isinstance(processes, int) else None)


def _check_of_trl(path: Path, fields: Set[str]) -> None:
    """Refuse YAML that is of something else, such as accelerate's, a part of verl's, or of supervised training."""
    if others := sorted(fields & _OF_OTHER_TRAININGS) if not fields & _OF_GRPO else []:
        raise UnreadableConfigurationError(
            f"{path} configures another training than GRPO: it has {', '.join(others)}, and none of GRPO's fields; if"
            " it is one, name its framework with --from"
        )
    unknown = sorted(fields - ROWS.keys() - {"num_processes"})
    if 2 * len(unknown) > len(fields):
        shown = ", ".join(unknown[:4]) + (" …" if len(unknown) > 4 else "")
        raise UnreadableConfigurationError(
            f"{path} is no configuration that is known: most of its fields are none of TRL's GRPO ({shown}), and it has"
            " none of verl's sections; if it is one, name its framework with --from"
        )


def _is_of_verl(content: Mapping[str, Any]) -> bool:
    data = content.get("data")
    return bool(_VERL_SECTIONS & content.keys()) or (isinstance(data, dict) and "train_files" in data)
