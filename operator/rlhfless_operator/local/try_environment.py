"""`rlhfless try-environment`: play episodes of a job's environment, without training."""

from rlhfless_functions.api.episode_trial import EpisodeTrial, EpisodeTrialResult, TriedEpisode
from rlhfless_operator.errors import UserError
from rlhfless_operator.formatting import format_number
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.functions_process import ask_functions

_FAILURES = ("toolSeconds", "episodeSeconds", "failed")
"""Ends of an episode that are faults of its environment."""


class EpisodeTrialError(UserError):
    """Nothing could be played."""


def make_trial(job: RLHFJob, *, prompts: int, samples: int) -> EpisodeTrial:
    """Make the request to the functions.

    Args:
        job: the job, with resolved paths.
        prompts: number of the data's first prompts to play.
        samples: episodes of each.

    Raises:
        EpisodeTrialError: the job has no environment.
    """
    spec = job.spec
    if spec.environment is None:
        raise EpisodeTrialError("the job has no spec.environment; add it, or try its rewards by rlhfless try-reward")
    return EpisodeTrial(
        model=spec.model,
        data=spec.data,
        environment=spec.environment,
        rewards=spec.rewards,
        sampling=spec.sampling,
        seed=spec.seed,
        total_steps=spec.steps or 1,
        prompts=prompts,
        samples=samples,
    )


def run_trial(trial: EpisodeTrial) -> EpisodeTrialResult:
    """Play in a process of the functions.

    Raises:
        FunctionsMissingError: torch and other packages are not installed.
        EpisodeTrialError: nothing could be played or scored.
    """
    answer = ask_functions("try_environment", trial, "playing", EpisodeTrialError)
    result = EpisodeTrialResult.model_validate_json(answer)
    if result.error is not None:
        raise EpisodeTrialError(result.error)
    return result


def faults(result: EpisodeTrialResult) -> list[str]:
    """Return the faults of the environment, one sentence for each episode."""
    return [
        f"row {each.row}: the environment failed ({each.outcome['ended']}); its own output above says more"
        for each in result.episodes
        if each.outcome.get("ended") in _FAILURES
    ]


def view(result: EpisodeTrialResult) -> str:
    """Return the episodes as text, each as a conversation with its end, its limits and its rewards."""
    return "\n\n".join(_episode(each) for each in result.episodes)


def _episode(episode: TriedEpisode) -> str:
    outcome = episode.outcome
    lines = [f"row {episode.row}", *_said("prompt", episode.prompt)]
    for message in episode.messages:
        lines += _said("model" if message["role"] == "assistant" else "given", message["content"])
    sampled = episode.tokens - episode.given_tokens
    lines.append(
        f"  ended: {outcome['ended']} after {outcome['turns']} turns with {sampled} sampled and {episode.given_tokens}"
        f" given tokens, {outcome['seconds_away']:.2f} s away"
    )
    if outcome["tool_errors"]:
        lines.append("  errors: " + ", ".join(f"{kind} {number}" for kind, number in outcome["tool_errors"].items()))
    lines.append("  rewards: " + ", ".join(f"{name} {_number(score)}" for name, score in episode.terms.items()))
    return "\n".join(lines)


def _said(who: str, text: str) -> list[str]:
    lines = text.split("\n")
    return [f"  {who:>6} | {line}" for line in lines[:1]] + [f"         | {line}" for line in lines[1:]]


def _number(score: float | None) -> str:
    return "none" if score is None else format_number(score)
