"""Play a job's environment without training, for `rlhfless try-environment`: the same data, engine and environments."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.api.episode_trial import EpisodeTrial, EpisodeTrialResult, TriedEpisode
from rlhfless_functions.data.dataset_files import first_rows, read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import GeneratedSample, continued_spans
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.environments.making import EpisodeMaker, episode_prompts
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.choice import EngineChoice, make_engine
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.turns.conversations import Conversations
from rlhfless_functions.preparation.reward_groups import conversation, head, reward_group, with_episodes
from rlhfless_functions.rewards.groups import Progress
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings
from rlhfless_functions.weights import load_config, load_tokenizer, longest_sequence

_FIRST_ROWS = 256
"""Most rows to tokenize, unless more prompts are wanted or none of them is short enough."""


def try_environment(trial: EpisodeTrial) -> EpisodeTrialResult:
    """Play and score episodes. The result includes errors of the job, of its environment and of its rewards."""
    try:
        initial = WeightsReference(version=0, uri=trial.model.source)
        tokenizer = load_tokenizer(trial.model, initial)
        prompts = _prompts(trial, tokenizer)
        with _episodes(trial) as episodes:
            samples = _played(trial, initial, prompts, episodes)
        terms = _scored(trial, tokenizer, prompts, samples)
    except (TaskError, artifacts.ArtifactError, ArithmeticError) as error:
        return EpisodeTrialResult(error=str(error))
    return EpisodeTrialResult(
        episodes=[_tried(tokenizer, prompts[sample.prompt], sample, terms[sample.key]) for sample in samples]
    )


def _prompts(trial: EpisodeTrial, tokenizer: PreTrainedTokenizerBase) -> dict[int, Prompt]:
    shown, _ = episode_prompts(trial.environment, trial.model, tokenizer, trial.data.chat_template_kwargs)
    positions = longest_sequence(load_config(trial.model.source, revision=trial.model.revision).get_text_config())
    tables = read_tables(trial.data)

    def made(rows: int | None) -> list[Prompt]:
        some = tables if rows is None else first_rows(tables, rows)
        return make_prompts(some, trial.data, trial.sampling, tokenizer, positions, episodes=shown)[0]

    try:
        found = made(max(_FIRST_ROWS, 4 * trial.prompts) if len(tables) == 1 else None)
    except TaskError:
        found = made(None)
    return {prompt.row: prompt for prompt in found[: trial.prompts]}


@contextmanager
def _episodes(trial: EpisodeTrial) -> Iterator[Episodes]:
    maker = EpisodeMaker()
    try:
        episodes = maker.make(trial.environment, trial.model, trial.data.chat_template_kwargs)
        try:
            yield episodes
        finally:
            episodes.close()
    finally:
        maker.close()


def _played(
    trial: EpisodeTrial, initial: WeightsReference, prompts: dict[int, Prompt], episodes: Episodes
) -> list[GeneratedSample]:
    """Return finished episodes, by the transformers engine with the job's seed."""
    engine = make_engine(EngineChoice("transformers", "it starts fastest"), EngineSettings())
    engine.load(trial.model, initial)
    tasks = [
        SequenceTask(row, index, prompt.tokens, sample_seed(trial.seed, "training", 1, row, index))
        for row, prompt in prompts.items()
        for index in range(trial.samples)
    ]
    run = engine.start(tasks, trial.sampling, None)
    turns = Conversations(episodes, prompts, trial.sampling.max_response_tokens)
    turns.begin(run, tasks, {})
    results = []
    while run.running or run.waiting or turns.away:
        results += turns.take(run, run.step())
        # Nothing is stored: answers go on at once.
        turns.storing()
        turns.go_on(run)
    return [
        GeneratedSample(
            prompt=result.prompt,
            index=result.index,
            prompt_tokens=prompts[result.prompt].tokens,
            response_tokens=result.response_tokens,
            log_probs=result.log_probs,
            finish_reason=result.finish_reason,
            versions=continued_spans((), 0, len(result.response_tokens)),
            given=turns.given((result.prompt, result.index)),
            outcome=turns.outcome((result.prompt, result.index)),
        )
        for result in sorted(results, key=lambda result: (result.prompt, result.index))
    ]


def _scored(
    trial: EpisodeTrial,
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[int, Prompt],
    samples: Sequence[GeneratedSample],
) -> dict[tuple[int, int], dict[str, float | None]]:
    """Return each sample's rewards by name."""
    # A trial shows every error, also errors that a job would only count.
    rewards = [reward.model_copy(update={"on_error": "fail"}) for reward in trial.rewards]
    members = {row: [sample for sample in samples if sample.prompt == row] for row in prompts}
    groups = []
    for row, prompt in prompts.items():
        ids = [sample.response_tokens[head(sample.given) :] for sample in members[row]]
        texts = [str(tokenizer.decode(each, skip_special_tokens=True)) for each in ids]
        reasons = [sample.finish_reason for sample in members[row]]
        groups.append(with_episodes(reward_group(prompt, texts, ids, reasons), members[row], tokenizer))
    scorer = RewardScorer()
    try:
        scorer.start(rewards)
        scores = scorer.score(rewards, groups, trial.sampling, Progress(total=trial.total_steps, epochs=1))
    finally:
        scorer.close()
    return {
        sample.key: {name: values[place][number] for name, values in scores.terms.items()}
        for place, row in enumerate(prompts)
        for number, sample in enumerate(members[row])
    }


def _tried(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, sample: GeneratedSample, terms: dict[str, float | None]
) -> TriedEpisode:
    begun = [*prompt.tokens, *sample.response_tokens[: head(sample.given)]]
    return TriedEpisode(
        row=sample.prompt,
        prompt=str(tokenizer.decode(begun)),
        messages=conversation(sample, tokenizer, whole=True),
        tokens=len(sample.response_tokens),
        given_tokens=sum(end - start for start, end in sample.given),
        finish_reason=sample.finish_reason,
        outcome=sample.outcome or {},
        terms=terms,
    )


def main() -> None:
    """Read an `EpisodeTrial` from standard input and write its result into the named file.

    Standard output is left to the libraries.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    # This is the output of the user's own environment.
    logging.getLogger("rlhfless.environments").setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()
    result = try_environment(EpisodeTrial.model_validate_json(sys.stdin.buffer.read()))
    Path(sys.argv[1]).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
