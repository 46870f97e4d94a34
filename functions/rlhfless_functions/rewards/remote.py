"""OpenRLHF's remote reward: an HTTP POST of `{query, prompts, labels}`, answered by `{rewards}`."""

import asyncio
import json
from typing import Any

import aiohttp

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.groups import RewardGroup

ATTEMPTS = 3
"""Most attempts of a call if the server is unreachable, overloaded or slow."""
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubled before each further one."""


_EXCERPT = 300
"""Most characters of an answer in an error."""


class RemoteError(Exception):
    """The server can't be used; the message says why."""


def remote_scorer(url: str, attempt_seconds: float) -> Scorer:
    """Ask a reward server for one group's scores.

    The request holds `query` (prompt and response as one text), `prompts` and `labels` (the ground truth, or null),
    one entry per response; the answer holds `rewards`, a number or null for each, and perhaps `extra_logs` with
    numbers.

    Args:
        url: address of the server.
        attempt_seconds: time limit of one attempt; a server error or a lost connection is tried again.
    """

    async def score(group: RewardGroup, call: Call) -> Any:
        body = {
            "query": [group.text + completion for completion in group.completions],
            "prompts": [group.text] * group.size,
            "labels": [group.columns.get("ground_truth")] * group.size,
        }
        answer = await _post(url, body, attempt_seconds)
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise RemoteError(f"{url} answered without 'rewards'{_shown(json.dumps(answer))}")
        for name, value in (answer.get("extra_logs") or {}).items():
            if isinstance(value, int | float):
                call.metrics.append((name, float(value)))
        return answer["rewards"]

    return score


def longest_call(attempt_seconds: float) -> float:
    """Return the most seconds of all attempts and pauses, plus a reserve of one attempt."""
    return (ATTEMPTS + 1) * attempt_seconds + FIRST_PAUSE * float(2 ** (ATTEMPTS - 1) - 1)


async def _post(url: str, body: dict[str, Any], seconds: float) -> Any:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                async with session.post(url, json=body, allow_redirects=False) as response:
                    if response.status < 300:
                        text = await response.text(errors="replace")
                        return json.loads(text)
                    said = (await response.content.read(_EXCERPT)).decode(errors="replace")
                    problem = f"answered {response.status} {response.reason}{_shown(said)}"
                    if response.status < 500 and response.status not in (408, 429):
                        break
            except TimeoutError:
                problem = f"did not answer within {seconds:g} s"
            except aiohttp.ClientError as error:
                problem = f"cannot be reached ({error})"
            except ValueError as error:
                problem = f"did not answer with JSON ({error}){_shown(text)}"
                break
    raise RemoteError(f"{url} {problem} ({attempt + 1} attempts)")


def _shown(text: str) -> str:
    """Return the beginning of an answer, to append to a sentence; empty if the answer is."""
    text = " ".join(text.split())
    return f": {text[: _EXCERPT - 3]}..." if len(text) > _EXCERPT else f": {text}" if text else ""
