"""Makes the environments of a request, and finds what prompts show of them."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhfless_functions.api import GenerationRequest, WeightsReference
from rlhfless_functions.data.chats import EpisodePrompts
from rlhfless_functions.environments.bridge import Bridge, BridgeError
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.environments.host import EpisodeHost
from rlhfless_functions.environments.openenv import OpenEnvHost
from rlhfless_functions.environments.playing import PlayedEpisodes
from rlhfless_functions.environments.served import ServedHost
from rlhfless_functions.environments.sessions import EnvironmentUnusableError, EpisodeUnreachableError, Host
from rlhfless_functions.environments.tool_calls import CallParser, check_tools
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings
from rlhfless_functions.weights.source import load_config, model_revision, weights_folder
from rlhfless_functions.weights.tokenizers import load_tokenizer


class EpisodeMaker:
    """Makes the environments of requests; keeps the host and the tokenizer between them."""

    def __init__(self) -> None:
        self._key = ""
        self._host: Host | None = None
        self._parts: tuple[Bridge, CallParser, PreTrainedTokenizerBase, list[int]] | None = None
        self._making, self._lock = threading.Lock(), threading.Lock()

    def __call__(self, request: GenerationRequest) -> Episodes | None:
        """Return the environments of a request's samples; None if the job has none.

        Raises:
            TaskError: `environment_failed`: the user's files or the server can't be used.
        """
        if request.environment is None:
            return None
        return self.make(request.environment, request.model, request.chat_template_kwargs)

    def make(
        self,
        settings: EnvironmentSettings,
        model: ModelSettings,
        template_arguments: Mapping[str, Any],
        actors: int = 1,
    ) -> PlayedEpisodes:
        """Return the environments of a job's samples.

        Raises:
            TaskError: as above.
        """
        with self._making:
            return self._made(settings, model, template_arguments, actors)

    def _made(
        self, settings: EnvironmentSettings, model: ModelSettings, template_arguments: Mapping[str, Any], actors: int
    ) -> PlayedEpisodes:
        key = settings.model_dump_json() + model.model_dump_json() + str(template_arguments)
        if key != self._key:
            self.close()
            self._key = key
        schemas = self._running(settings).schemas
        if self._parts is None:
            tokenizer = load_tokenizer(model, _original(model))
            stop = stop_tokens(model, tokenizer)
            bridge = Bridge(tokenizer, schemas, template_arguments, stop)
            with _refused():
                parser = CallParser(tokenizer, schemas, bridge.generation_prompt)
            self._parts = (bridge, parser, tokenizer, stop)
        bridge, parser, tokenizer, stop = self._parts
        return PlayedEpisodes(settings, lambda: self._running(settings), bridge, parser, tokenizer, stop, actors)

    def close(self) -> None:
        """End the host."""
        if self._host is not None:
            self._host.close()
        self._host = self._parts = None

    def _running(self, settings: EnvironmentSettings) -> Host:
        with self._lock:
            if self._host is not None and not self._host.alive():
                self._host.close()
                self._host = None
            if self._host is None:
                self._host = _started(settings)
            return self._host


def episode_prompts(
    settings: EnvironmentSettings,
    model: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> tuple[EpisodePrompts, list[str]]:
    """Return what prompts have for an environment, and remarks for people, after checking that the chat template can
    carry it.

    Raises:
        TaskError: `environment_failed` or `data_invalid`; the message has the remedy.
    """
    host = _started(settings)
    host.close()
    with _refused():
        return _checked(
            host.schemas, host.is_game, settings, tokenizer, template_arguments, stop_tokens(model, tokenizer)
        )


def _checked(
    schemas: list[dict[str, Any]],
    is_game: bool,
    settings: EnvironmentSettings,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
    stop: Sequence[int],
) -> tuple[EpisodePrompts, list[str]]:
    bridge = Bridge(tokenizer, schemas, template_arguments, stop)
    closing = bridge.generation_prompt
    if is_game:
        bridge.after_text(None, "text")
    else:
        check_tools(bridge, CallParser(tokenizer, schemas, closing))
    notes = []
    said = {"role": "assistant", "content": "answer", "reasoning_content": "thought"}
    if is_game and not bridge.keeps_history(said, [{"role": "user", "content": "next"}]):
        notes.append(
            "the chat template removes or changes earlier turns of the model once messages follow; training keeps every"
            " token that was sampled, so serve the model with a template that keeps them, too"
        )
    return EpisodePrompts(schemas, closing if settings.is_scored else ""), notes


def stop_tokens(model: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a turn, as the engines have them."""
    folder: Path = weights_folder(model.source, revision=model_revision(model, model.source), verify=False)
    configured: Any = None
    with suppress(OSError):
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
    if configured is None:
        configured = load_config(model.source, revision=model_revision(model, model.source)).eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({each for each in [*ids, tokenizer.eos_token_id] if each is not None})


def _started(settings: EnvironmentSettings) -> Host:
    try:
        if settings.openenv is not None:
            return OpenEnvHost(settings)
        return EpisodeHost(settings) if settings.served is None else ServedHost(settings)
    except EnvironmentUnusableError as error:
        # A server that others have filled, or that starts slowly, may answer the next attempt.
        unreachable = isinstance(error.__cause__, EpisodeUnreachableError)
        raise TaskError("environment_failed", f"the environment {error}", retryable=unreachable) from error


def _original(model: ModelSettings) -> WeightsReference:
    return WeightsReference(version=0, uri=model.source)


@contextmanager
def _refused() -> Iterator[None]:
    """Raise what a template can't do as a fault of the job."""
    try:
        yield
    except BridgeError as error:
        raise TaskError("environment_failed", f"environment: {error}") from error
