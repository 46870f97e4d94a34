"""Score responses by a job's rewards without training, for `rlhfless try-reward`: the same data, engine and workers."""

import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.api.reward_trial import (
    GivenResponse,
    RewardTrial,
    RewardTrialResult,
    TriedResponse,
    TriedReward,
)
from rlhfless_functions.data.dataset_files import Table, first_rows, prompt_column, read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.choice import EngineChoice, make_engine
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.preparation.reward_groups import reward_group
from rlhfless_functions.rewards.groups import Progress, RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer, weighted_sum
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, RewardSettings
from rlhfless_functions.weights import load_config, load_tokenizer, longest_sequence

_FIRST_ROWS = 256
"""Rows to tokenize at first: a large dataset is not tokenized whole for a few of its rows."""


@dataclass
class _Group:
    prompt: Prompt
    in_data: bool
    responses: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def add(self, response: str, tokens: list[int], finish_reason: str) -> None:
        self.responses.append(response)
        self.tokens.append(tokens)
        self.finish_reasons.append(finish_reason)

    def for_rewards(self) -> RewardGroup:
        return reward_group(self.prompt, self.responses, self.tokens, self.finish_reasons)


def try_rewards(trial: RewardTrial) -> RewardTrialResult:
    """Score given or sampled responses. The result includes errors of the job and of the rewards."""
    try:
        initial = WeightsReference(version=0, uri=trial.model.source)
        tokenizer = load_tokenizer(trial.model, initial)
        groups = _given(trial, tokenizer) if trial.responses else _sampled(trial, tokenizer, initial)
    except (TaskError, artifacts.ArtifactError, FloatingPointError, ArithmeticError) as error:
        return RewardTrialResult(error=str(error))
    scorer = RewardScorer()
    try:
        return _score(trial, groups, scorer)
    finally:
        scorer.close()


# --- responses ---------------------------------------------------------------------------------------------------


class _Rows:
    """The data's prompts, from the first on, as many as are needed."""

    def __init__(self, trial: RewardTrial, tokenizer: PreTrainedTokenizerBase) -> None:
        self._trial = trial
        self._tokenizer = tokenizer
        self.tables = read_tables(trial.data)
        self.whole = max(len(table.rows) for table in self.tables)
        config = load_config(trial.model.source, revision=trial.model.revision)
        self._positions = longest_sequence(config.get_text_config())
        self._read = 0
        self.prompts: list[Prompt] = []

    def more(self) -> bool:
        """Read more rows. Return whether there were any."""
        # Rows of several sources are numbered one source after the other.
        at_first = _FIRST_ROWS if len(self.tables) == 1 else self.whole
        while self._read < self.whole:
            self._read = min(self.whole, max(at_first, 4 * self._read))
            try:
                self.prompts = self.made(first_rows(self.tables, self._read))
            except TaskError:
                # Perhaps none of the first rows is short enough.
                if self._read == self.whole:
                    raise
                continue
            return True
        return False

    def made(self, tables: Sequence[Table]) -> list[Prompt]:
        """Return the prompts of tables, as training makes them."""
        trial = self._trial
        prompts, _ = make_prompts(tables, trial.data, trial.sampling, self._tokenizer, self._positions)
        return prompts


def _given(trial: RewardTrial, tokenizer: PreTrainedTokenizerBase) -> list[_Group]:
    rows = _Rows(trial, tokenizer)
    rows.more()
    groups: dict[int, _Group] = {}
    following = 0
    for given in trial.responses:
        if given.row is None and given.prompt is None:
            prompt, in_data, following = _row(rows, following, given), True, following + 1
        elif given.row is not None:
            prompt, in_data = _row(rows, given.row, given), True
        else:
            found = _find(rows, given)
            prompt, in_data = (_own(rows, given, len(groups)), False) if found is None else (found, True)
        group = groups.setdefault(prompt.row, _Group(prompt, in_data))
        ends = [tokenizer.eos_token_id] if given.finish_reason == "stop" and tokenizer.eos_token_id is not None else []
        ids = list(tokenizer(given.response, add_special_tokens=False)["input_ids"])
        group.add(given.response, ids + ends, given.finish_reason)
    return list(groups.values())


def _row(rows: _Rows, row: int, given: GivenResponse) -> Prompt:
    while row >= len(rows.prompts):
        if not rows.more():
            last = len(rows.prompts) - 1
            raise TaskError("data_invalid", f"{given.place}: the data has rows 0 to {last}, not {row}")
    return rows.prompts[row]


def _find(rows: _Rows, given: GivenResponse) -> Prompt | None:
    """Return the data's row with this prompt: as the model sees it, as messages, or as the user's last message."""
    seen = 0
    while True:
        for prompt in rows.prompts[seen:]:
            messages = prompt.messages or []
            asked = messages[-1]["content"] if messages else None
            if given.prompt in (prompt.text, asked) or (messages and given.prompt in (messages, messages[1:])):
                return prompt
        seen = len(rows.prompts)
        if not rows.more():
            return None


def _own(rows: _Rows, given: GivenResponse, number: int) -> Prompt:
    """Return a prompt that the data does not have, with its columns."""
    table = rows.tables[0]
    row = {**given.columns, prompt_column(table): given.prompt}
    (prompt,) = rows.made([Table(given.place, [row], reading=table.reading)])
    return replace(prompt, row=sum(len(each.rows) for each in rows.tables) + number)


def _sampled(trial: RewardTrial, tokenizer: PreTrainedTokenizerBase, initial: WeightsReference) -> list[_Group]:
    """Return the model's responses to the data's first prompts, by the transformers engine with the job's seed."""
    rows = _Rows(trial, tokenizer)
    while len(rows.prompts) < trial.prompts and rows.more():
        pass
    groups = {prompt.row: _Group(prompt, True) for prompt in rows.prompts[: trial.prompts]}
    engine = make_engine(EngineChoice("transformers", "it starts fastest"), EngineSettings())
    engine.load(trial.model, initial)
    tasks = [
        SequenceTask(row, index, group.prompt.tokens, sample_seed(trial.seed, "training", 1, row, index))
        for row, group in groups.items()
        for index in range(trial.samples)
    ]
    run = engine.start(tasks, trial.sampling, None)
    results = []
    while run.running or run.waiting:
        results += run.step()
    for result in sorted(results, key=lambda result: result.index):
        text = str(tokenizer.decode(result.response_tokens, skip_special_tokens=True))
        groups[result.prompt].add(text, result.response_tokens, result.finish_reason)
    return list(groups.values())


# --- scores ------------------------------------------------------------------------------------------------------


def _score(trial: RewardTrial, groups: Sequence[_Group], scorer: RewardScorer) -> RewardTrialResult:
    # A trial shows every error, also errors that a job would only count.
    rewards = [reward.model_copy(update={"on_error": "fail"}) for reward in trial.rewards]
    scorer.start(rewards)
    terms: list[list[dict[str, float | None]]] = [[{} for _ in group.responses] for group in groups]
    tried = [_try(reward, groups, terms, trial, scorer) for reward in rewards]
    weights = {reward.name: reward.weight for reward in rewards}
    responses = [
        TriedResponse(
            row=group.prompt.row if group.in_data else None,
            prompt=group.prompt.text,
            response=response,
            tokens=len(group.tokens[number]),
            finish_reason=group.finish_reasons[number],
            terms=terms[place][number],
            reward=_total(terms[place][number], weights),
        )
        for place, group in enumerate(groups)
        for number, response in enumerate(group.responses)
    ]
    return RewardTrialResult(responses=responses, rewards=tried)


def _total(terms: dict[str, float | None], weights: dict[str, float]) -> float | None:
    """Return the weighted sum; None if a term that counts has failed, because the others are not the reward."""
    failed = any(weight != 0 and name not in terms for name, weight in weights.items())
    return None if failed else weighted_sum(terms, weights)


def _try(
    reward: RewardSettings,
    groups: Sequence[_Group],
    terms: list[list[dict[str, float | None]]],
    trial: RewardTrial,
    scorer: RewardScorer,
) -> TriedReward:
    """Call one reward for each group, up to the first call that fails; its numbers go into `terms`."""
    seconds: list[float] = []
    error: str | None = None
    progress = Progress(total=trial.total_steps, epochs=1)
    for place, group in enumerate(groups):
        begun = time.monotonic()
        try:
            scores = scorer.score([reward], [group.for_rewards()], trial.sampling, progress)
        except TaskError as failure:
            error = str(failure)
        seconds.append(time.monotonic() - begun)
        if error is not None:
            break
        for response, score in zip(terms[place], scores.terms[reward.name][0], strict=True):
            response[reward.name] = score
    return TriedReward(
        name=reward.name,
        kind=reward.kind,
        weight=reward.weight,
        calls=len(seconds),
        first_seconds=seconds[0],
        mean_seconds=statistics.fmean(seconds[1:]) if len(seconds) > 1 else None,
        error=error,
    )


def main() -> None:
    """Read a `RewardTrial` from standard input and write its result into the named file.

    Standard output is left to the libraries.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # This is the output of a user's function.
    logging.getLogger("rlhfless.rewards").setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()
    result = try_rewards(RewardTrial.model_validate_json(sys.stdin.buffer.read()))
    Path(sys.argv[1]).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
