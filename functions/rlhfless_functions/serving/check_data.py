"""Read a job's data as training does, for `rlhfless validate --data`: the same sources, template and checks."""

import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.api.data_check import DataCheck, DataCheckResult, ShownPrompt
from rlhfless_functions.data.chats import EpisodePrompts
from rlhfless_functions.data.dataset_files import Table, read_table
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.left_out import check_left_out
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.environments.making import episode_prompts
from rlhfless_functions.rewards.truth_check import unreadable_truths
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import RewardSettings
from rlhfless_functions.weights import load_config, load_tokenizer, longest_sequence

_CHECKING_SECONDS = 600.0
"""Most time to read the ground truths. Training spends less, because it holds instances meanwhile."""


def check_data(question: DataCheck) -> DataCheckResult:
    """Return the first prompts of each source, and every fault that training would stop at."""
    model, faults, tables = question.model, [], []
    # What the user's own functions print is shown: standard output is not.
    with redirect_stdout(sys.stderr):
        for part in question.data.parts:
            try:
                tables.append(read_table(part))
            except (TaskError, artifacts.ArtifactError) as error:
                faults.append(str(error))
    try:
        tokenizer = load_tokenizer(model, WeightsReference(version=0, uri=model.source))
        config = load_config(model.source, revision=model.revision)
    except (TaskError, artifacts.ArtifactError) as error:
        return DataCheckResult(faults=[*faults, str(error)])
    episodes, notes = None, list[str]()
    if question.environment is not None:
        try:
            arguments = question.data.chat_template_kwargs
            episodes, notes = episode_prompts(question.environment, model, tokenizer, arguments)
        except (TaskError, artifacts.ArtifactError) as error:
            return DataCheckResult(faults=[*faults, str(error)])
    reader = _Reader(question, tokenizer, longest_sequence(config.get_text_config()), episodes, notes)
    return reader.faulty(tables, faults) if faults else reader.whole(tables)


class _Reader:
    """Makes prompts of a job's tables, as training does."""

    def __init__(
        self,
        question: DataCheck,
        tokenizer: PreTrainedTokenizerBase,
        positions: int | None,
        episodes: EpisodePrompts | None,
        notes: list[str],
    ) -> None:
        self._notes = notes
        self._question = question
        self._tokenizer = tokenizer
        make = partial(make_prompts, data=question.data, sampling=question.sampling, tokenizer=tokenizer)
        unreadable = partial(unreadable_truths, seconds=_CHECKING_SECONDS)
        self._make = partial(make, positions=positions, unreadable=unreadable, episodes=episodes)

    def whole(self, tables: Sequence[Table]) -> DataCheckResult:
        """Check all sources together."""
        question = self._question
        try:
            prompts, counts = self._make(tables, rewards=question.rewards)
            check_left_out(tables, counts, question.most_dropped)
        except TaskError as error:
            result = self.faulty(tables, [])
            # The sources may be wrong only together, as when too many rows of all are dropped.
            return result if result.faults else result.model_copy(update={"faults": [str(error)]})
        rest, shown = iter(prompts), []
        for table, size in zip(tables, counts.sizes, strict=True):
            shown += self._shown(table, [next(rest) for _ in range(size)])
        counts = counts.model_copy(update={"notes": [*counts.notes, *self._notes]})
        return DataCheckResult(prompts=shown, counts=counts)

    def faulty(self, tables: Sequence[Table], faults: Sequence[str]) -> DataCheckResult:
        """Find the faults of each source and each reward, where training names the first alone."""
        shown, found = [], list(faults)
        for table in tables:
            try:
                prompts, _ = self._make([table], rewards=())
            except TaskError as error:
                found.append(str(error))
                continue
            shown += self._shown(table, prompts)
            found += self._faults_of_rewards(table)
        return DataCheckResult(prompts=shown, faults=list(dict.fromkeys(found)))

    def _faults_of_rewards(self, table: Table) -> Iterable[str]:
        for reward in self._question.rewards:
            if (fault := self._fault_of(table, reward)) is not None:
                yield fault

    def _fault_of(self, table: Table, reward: RewardSettings) -> str | None:
        try:
            self._make([table], rewards=[reward])
        except TaskError as error:
            return str(error)
        return None

    def _shown(self, table: Table, prompts: Sequence[Prompt]) -> list[ShownPrompt]:
        return [
            ShownPrompt(
                source=table.source,
                row=prompt.row,
                text=str(self._tokenizer.decode(prompt.tokens, clean_up_tokenization_spaces=False)),
                tokens=len(prompt.tokens),
                is_chat=prompt.messages is not None,
                ground_truth=prompt.ground_truth,
            )
            for prompt in prompts[: self._question.prompts]
        ]


def main() -> None:
    """Read a `DataCheck` from standard input and write its result into the named file."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    result = check_data(DataCheck.model_validate_json(sys.stdin.buffer.read()))
    Path(sys.argv[1]).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
