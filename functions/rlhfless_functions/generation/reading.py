"""Read what a share needs from the store: its prompts, and what earlier attempts have left of it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rlhfless_functions.api import Event, GenerationRequest, Samples
from rlhfless_functions.data.prompts import Prompt, read_prompts
from rlhfless_functions.generation.resumption import EarlierSamples, find_earlier, rollout_parts
from rlhfless_functions.generation.rollout_files import announced
from rlhfless_functions.runtime.task import TaskError


@dataclass(frozen=True)
class Read:
    """The prompts and earlier attempts of some samples."""

    prompts: dict[int, Prompt]
    """Their prompts by row."""
    earlier: EarlierSamples
    """Their earlier attempts."""
    parts: list[str]
    """Parts that are in the share's own sink."""
    is_finished: bool
    """Whether earlier attempts have finished all of them."""


def read_share(
    request: GenerationRequest, emit: Callable[[Event], None], version: int | None = None, *, own_sink: bool = True
) -> Read:
    """Read what the samples of a request need, and announce those that are finished.

    Args:
        emit: sends an event; thread-safe.
        version: version of the batch that they join, if the request lets newer ones go on with them.
        own_sink: whether the request's own sink may hold something of them.

    Raises:
        TaskError: `bad_request` or `data_invalid`, naming a prompt.
        ArtifactError: the store can't be read.
    """
    prompts = _prompts(request)
    parts = rollout_parts(request.sink) if own_sink else []
    wanted = {(sample.prompt, sample.index) for sample in request.samples}
    places = [*request.resume_from, request.sink] if own_sink else request.resume_from
    own, oldest = request.weights.version, request.oldest_version
    oldest, newest = (own, own) if oldest is None else (oldest, max(own, version or 0))
    earlier = find_earlier(places, wanted, range(oldest, newest + 1), request.known_until)
    for part, rollouts in earlier.finished.items():
        emit(Samples(samples=announced(rollouts), part=part))
    return Read(prompts, earlier, parts, sum(map(len, earlier.finished.values())) == len(wanted))


def _prompts(request: GenerationRequest) -> dict[int, Prompt]:
    """Return the share's prompts by row, checked."""
    most_common = Counter((sample.prompt, sample.index) for sample in request.samples).most_common(1)[0]
    if most_common[1] > 1:
        prompt, index = most_common[0]
        raise TaskError(
            "bad_request", f"samples: sample {index} of prompt {prompt} is requested {most_common[1]} times"
        )
    try:
        read = read_prompts(request.prompts, sorted({sample.prompt for sample in request.samples}))
    except IndexError as error:
        raise TaskError("bad_request", f"samples: {error}") from error
    longest = request.sampling.max_prompt_tokens
    for prompt_read in read:
        if len(prompt_read.tokens) > longest:
            raise TaskError(
                "data_invalid",
                f"prompt {prompt_read.row} has {len(prompt_read.tokens)} tokens, more than sampling.maxPromptTokens"
                f" ({longest}); raise the limit, or materialise the data again, which drops it",
            )
    return {prompt_read.row: prompt_read for prompt_read in read}
