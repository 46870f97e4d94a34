"""The check that the contents of a job's local files fit the job: columns of data, labels and layers of models."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhfless_functions.data.code_tests.forms import TEST_COLUMNS
from rlhfless_functions.data.rows import GROUND_TRUTH_COLUMNS, PROMPT_COLUMNS
from rlhfless_functions.data.sources import is_pattern
from rlhfless_functions.settings import DataSettings, MixedSource, RewardSettings
from rlhfless_functions.settings.data import HUB
from rlhfless_operator.job.paths import exists, is_uri, local_file, local_model
from rlhfless_operator.job.reading.data_files import Columns, UnreadableDataError, read_columns
from rlhfless_operator.job.reading.fields import Path as FieldPath
from rlhfless_operator.job.reading.fields import show_path
from rlhfless_operator.job.reading.job_files import FileFault, sources_of
from rlhfless_operator.job.reading.model_files import UnreadableModelError, label_count, layer_names, read_config
from rlhfless_operator.job.spec import RLHFJob, RLHFJobSpec

_NEEDING_TRUTH = ("math", "exact_match")
"""Kinds of rewards that compare with the ground truth."""


def check_contents(job: RLHFJob, base: Path) -> list[FileFault]:
    """Find the faults in the contents of a job's local files. `check_files` reports missing files.

    Args:
        job: the job as read, with paths relative to the job file.
        base: the job file's folder.
    """
    spec = job.spec
    if spec.rehearsal is not None:
        return []  # it loads no models, takes its prompts from a trace, and scores nothing
    faults = [*_policy(job, base)]
    for place, reward in _every_reward(spec).items():
        if reward.model is not None:
            faults += _reward_model((*place, "model", "source"), reward.model.source, base)
    faults += _data(("spec", "data"), spec.data, _training_rewards(spec), base)
    if spec.evaluation is not None:
        faults += _data(("spec", "evaluation", "data"), spec.evaluation.data, _evaluation_rewards(spec), base)
    return faults


def not_checked(job: RLHFJob, base: Path) -> list[str]:
    """Return the files and models that this machine can't check: a line each, with the field and the reason."""
    spec = job.spec
    models: list[tuple[FieldPath, str]] = [(("spec", "model", "source"), spec.model.source)]
    datasets = [*sources_of(("spec", "data"), spec.data)]
    if spec.model.tokenizer is not None:
        models.append((("spec", "model", "tokenizer"), spec.model.tokenizer))
    if spec.evaluation is not None:
        datasets += sources_of(("spec", "evaluation", "data"), spec.evaluation.data)
    files: list[tuple[FieldPath, str]] = [((*place, "source"), part.source) for place, part in datasets]
    for place, reward in _every_reward(spec).items():
        if reward.model is not None:
            models.append(((*place, "model", "source"), reward.model.source))
        if reward.python is not None:
            files.append(((*place, "python", "file"), reward.python.file))
        if reward.http is not None:
            files.append(((*place, "http", "url"), reward.http.url))
    if spec.environment is not None:
        files += [(("spec", "environment"), file) for file in spec.environment.files]
    found = [
        f"{show_path(field)}: {name} is {'in a store' if is_uri(name) else 'on the hub'}, not on this machine"
        for field, name in models
        if local_model(name, base) is None
    ]
    server = spec.environment_server
    if server is not None and server.command is None:
        found.append("spec.environment.openenv.image: it runs on a cluster only, and `rlhfless run` needs a command")
    return found + [
        f"{show_path(field)}: {name} is {'on the hub' if name.startswith(HUB) else 'not on this machine'}"
        for field, name in files
        if local_file(name, base) is None
    ]


_Placed = tuple[FieldPath, RewardSettings]
"""A reward and the path of its field."""


def _training_rewards(spec: RLHFJobSpec) -> list[_Placed]:
    return [(("spec", "rewards", position), reward) for position, reward in enumerate(spec.rewards)]


def _evaluation_rewards(spec: RLHFJobSpec) -> list[_Placed]:
    if spec.evaluation is None or spec.evaluation.rewards is None:
        return _training_rewards(spec)
    rewards = enumerate(spec.evaluation.rewards)
    return [(("spec", "evaluation", "rewards", position), reward) for position, reward in rewards]


def _every_reward(spec: RLHFJobSpec) -> dict[FieldPath, RewardSettings]:
    return dict(_training_rewards(spec) + _evaluation_rewards(spec))


def _policy(job: RLHFJob, base: Path) -> Iterator[FileFault]:
    model = job.spec.model
    folder = local_model(model.source, base)
    if folder is None or not (folder / "config.json").is_file():
        return
    try:
        config = read_config(folder)
        layers = layer_names(folder, config) if model.lora is not None else None
    except UnreadableModelError as error:
        yield FileFault(("spec", "model", "source"), str(error), "save or download the model again")
        return
    if model.lora is None or layers is None or model.lora.target_modules == ["all-linear"]:
        return
    tied = bool(config.get("tie_word_embeddings"))
    known = sorted({last for name in layers if "embed" not in (last := name.rpartition(".")[2])} - {"lm_head"})
    for position, target in enumerate(model.lora.target_modules):
        field = ("spec", "model", "lora", "targetModules", position)
        # A tied output layer has no weights of its own in the files.
        there = target == "lm_head" or any(name == target or name.endswith(f".{target}") for name in layers)
        if not there:
            yield FileFault(
                field, f"{target} is not a layer of {folder}", f"name any of {', '.join(known)}, or all-linear"
            )
        elif tied and (target == "lm_head" or "embed" in target):
            yield FileFault(
                field, f"{target} shares its weight with another layer of {folder}", "remove it, as all-linear does"
            )


def _reward_model(field: FieldPath, name: str, base: Path) -> Iterator[FileFault]:
    folder = local_model(name, base)
    if folder is None or not (folder / "config.json").is_file():
        return
    try:
        labels = label_count(read_config(folder))
    except UnreadableModelError as error:
        yield FileFault(field, str(error), "save or download the model again")
        return
    if labels != 1:
        yield FileFault(
            field,
            f"{folder} has {labels} labels, but a reward model must have one, whose logit is the reward",
            "name a model with num_labels=1, or score with python",
        )


def _data(section: FieldPath, data: DataSettings, rewards: list[_Placed], base: Path) -> Iterator[FileFault]:
    for field, part in sources_of(section, data):
        yield from _source(field, part, rewards, base)


def _source(field: FieldPath, data: MixedSource, rewards: list[_Placed], base: Path) -> Iterator[FileFault]:
    path = local_file(data.source, base)
    if path is None or not (exists(path) or is_pattern(data.source)) or (path.is_file() and not path.stat().st_size):
        return
    if path.is_dir() and not any(path.iterdir()):
        return
    tests = [name for _, reward in rewards if reward.code is not None for name in _tests_columns(reward)]
    named = [name for name in (data.prompt_column, data.ground_truth_column) if name is not None]
    try:
        columns = read_columns(data, path, {*PROMPT_COLUMNS, *GROUND_TRUTH_COLUMNS, *tests, *named})
    except UnreadableDataError as error:
        yield FileFault((*field, "source"), str(error), error.remedy)
        return
    if columns is None or data.map is not None:
        return  # The columns that `map` makes are known only once it runs.
    yield from _named_column(field, "promptColumn", data.prompt_column, path, columns)
    if data.prompt_column is None and columns.held.isdisjoint(PROMPT_COLUMNS):
        lack = f"{path} has no prompt column (one of {', '.join(PROMPT_COLUMNS)})"
        yield FileFault((*field, "source"), lack, _name_one(columns, "promptColumn"))
    yield from _named_column(field, "groundTruthColumn", data.ground_truth_column, path, columns)
    truth = data.ground_truth_column is not None or not columns.held.isdisjoint(GROUND_TRUTH_COLUMNS)
    for place, reward in rewards:
        if reward.code is not None and columns.held.isdisjoint(_tests_columns(reward)):
            either = " or ".join(map(repr, _tests_columns(reward)))
            lack = f"{path} has no column {either}, which {reward.name} takes its tests from"
            remedy = f"it has {', '.join(columns.names)}: set code.testsColumn to one of them, or add the column"
            yield FileFault((*place, "code", "testsColumn"), lack, remedy)
        if reward.kind in _NEEDING_TRUTH and not truth:
            usual = ", ".join(GROUND_TRUTH_COLUMNS)
            lack = f"{path} has no ground truth (no column {usual}), which {reward.name} compares with"
            yield FileFault(place, lack, _name_one(columns, "groundTruthColumn"))


def _tests_columns(reward: RewardSettings) -> Sequence[str]:
    named = reward.code.tests_column if reward.code is not None else None
    return TEST_COLUMNS if named is None else (named,)


def _named_column(
    field: FieldPath, setting: str, named: str | None, path: Path, columns: Columns
) -> Iterator[FileFault]:
    if named is not None and named not in columns.held:
        yield FileFault((*field, setting), f"{path} has no column {named!r}", _name_one(columns, setting))


def _name_one(columns: Columns, setting: str) -> str:
    return f"it has {', '.join(columns.names)}: set {setting} to one of them"
