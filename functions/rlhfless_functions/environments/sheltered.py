"""The episodes of an actor whose environments are in a shelter: a thread that exchanges turns for answers."""

import http.client
import json
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from rlhfless_functions.api import Shelter
from rlhfless_functions.environments.episodes import Observation, SampleKey, Turn, gathered
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings

_ANSWER_SECONDS = 360.0
"""Time limit of an exchange. The first one waits until the user's files have run."""
_RETRY_SECONDS = 120.0
"""Longest time in which an exchange is tried again: a pod of the shelter that has died is replaced meanwhile. A turn
may be handed over twice."""
_PAUSE_SECONDS = 0.5
_NOBODY_THERE = (502, 503, 504)
"""Statuses of the proxies before a pod that is not there, or that has gone."""
_OBSERVATIONS: TypeAdapter[list[Observation]] = TypeAdapter(list[Observation])


class ShelteredEpisodes:
    """The environments of a share; see `Episodes`. They stay in the shelter when this is closed.

    Args:
        shelter: the process that has them.
        settings: the job's environment.
        model: the job's model.
        template_arguments: arguments of its chat template.
    """

    def __init__(
        self,
        shelter: Shelter,
        settings: EnvironmentSettings,
        model: ModelSettings,
        template_arguments: Mapping[str, Any],
    ) -> None:
        self._shelter = shelter
        self._said = {
            "rollout": shelter.rollout,
            "actors": shelter.actors,
            "environment": json.loads(settings.model_dump_json()),
            "model": json.loads(model.model_dump_json()),
            "chat_template_kwargs": dict(template_arguments),
        }
        self._outbox: list[Turn] = []
        self._awaited: dict[SampleKey, Turn] = {}
        self._answers: queue.SimpleQueue[Observation | Exception] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shelter", daemon=True)
        self._thread.start()

    def submit(self, turn: Turn) -> None:
        """Hand a turn over, without waiting."""
        with self._changed:
            self._outbox.append(turn)
            self._awaited[turn.sample] = turn
            self._changed.notify()

    def ready(self, wait_seconds: float) -> list[Observation]:
        """Return the answers that have come; see `Episodes`.

        Raises:
            TaskError: `environment_failed`: the environment fails and the job is to end, or the shelter is gone.
        """
        return gathered(self._answers, wait_seconds)

    def close(self) -> None:
        """Stop asking. The episodes go on."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        # The first exchange may wait for the user's files for long.
        self._thread.join(timeout=1)

    def _run(self) -> None:
        place = urlsplit(self._shelter.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=_ANSWER_SECONDS)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._awaited)
                    if self._closed:
                        return
                    turns, self._outbox = self._outbox, []
                    awaited = sorted(self._awaited)
                answers, lost = self._exchange(connection, turns, awaited)
                with self._changed:
                    for answer in answers:
                        del self._awaited[answer.sample]
                    self._outbox += [self._awaited[key] for key in lost]
                for answer in answers:
                    self._answers.put(answer)
        except Exception as error:
            self._answers.put(error)
        finally:
            connection.close()

    def _exchange(
        self, connection: http.client.HTTPConnection, turns: list[Turn], awaited: list[SampleKey]
    ) -> tuple[list[Observation], list[SampleKey]]:
        """Return the answers, and the samples whose turns must be handed over again."""
        body = json.dumps({**self._said, "turns": [asdict(turn) for turn in turns], "awaited": awaited})
        status, text = self._sent(connection, body)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise _unanswered(f"status {status}") from error
        if status == 409:
            raise TaskError(answer["reason"], answer["message"], retryable=answer["retryable"])
        if status != 200:
            raise TaskError("environment_failed", f"the process that keeps the episodes refuses a turn: {answer}")
        lost = [(prompt, index) for prompt, index in answer["lost"]]
        return _OBSERVATIONS.validate_python(answer["observations"]), lost

    def _sent(self, connection: http.client.HTTPConnection, body: str) -> tuple[int, bytes]:
        """Return the status and the body of an answer to an exchange."""
        headers = {"Authorization": f"Bearer {self._shelter.token}", "Content-Type": "application/json"}
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                connection.request("POST", "/v1/exchange", body, headers)
                response = connection.getresponse()
                text = response.read()
                if response.status not in _NOBODY_THERE:
                    return response.status, text
                problem = f"status {response.status}"
            except ConnectionRefusedError as error:
                # A process on this machine that has died comes back at another address.
                raise _unanswered(str(error)) from error
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            connection.close()
            with self._changed:
                if self._closed or time.monotonic() > deadline:
                    raise _unanswered(problem)
                self._changed.wait(_PAUSE_SECONDS)


def _unanswered(problem: str) -> TaskError:
    return TaskError(
        "environment_failed", f"the process that keeps the episodes does not answer: {problem}", retryable=True
    )
