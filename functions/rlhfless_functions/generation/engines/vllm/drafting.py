"""Drafts for vLLM's requests, from rlhfless's own drafter.

vLLM asks for drafts after each pass, for all requests of its batch, by name. A request's place in the batch changes,
but in the drafter it keeps one row as long as it runs.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhfless_functions.generation.drafting.drafter import Drafter, Drafts, PassTiming
from rlhfless_functions.generation.engines.base import SequenceTask

LONGEST_DRAFT = 15
"""Most drafted tokens of a request in a pass, unless vLLM has less room."""
_FILLER = 0
"""A token that makes a draft as long as the others'. It is kept if it happens to be the one that is drawn."""


class DraftedRequests:
    """The requests of a run, and their rows in the drafter.

    Args:
        drafter: has a row for each request that vLLM holds at a time.
        rows: number of the drafter's rows.
        most_rows: most rows of logits in a pass, those of drafts included.
        longest_response: most tokens of a response.
        longest_draft: most drafted tokens of a request in a pass; vLLM has buffers for so many.
        positions: most tokens of a request, its drafts included.
        widths: rows of a request in a pass, of which vLLM has CUDA graphs; empty if requests may have any.
    """

    def __init__(
        self,
        drafter: Drafter,
        rows: int,
        most_rows: int,
        longest_response: int,
        longest_draft: int,
        positions: int,
        widths: Sequence[int] = (),
    ) -> None:
        self.drafter = drafter
        self._most_rows = most_rows
        self._longest_response = longest_response
        self._longest_draft = longest_draft
        self._positions = positions
        self._widths = widths
        self._free = list(range(rows - 1, -1, -1))
        self._rows: dict[str, int] = {}
        self._tasks: list[SequenceTask | None] = [None] * rows
        self._seated = np.zeros(rows, dtype=bool)
        """Rows that had a sequence before the last pass."""
        self._drafts: Drafts | None = None
        self._began: float | None = None
        self.passes = 0
        self.sequence_passes = 0
        """Sum over passes of the requests that got tokens."""

    def add(self, name: str, task: SequenceTask) -> None:
        """Record that a request has been handed to vLLM."""
        self._rows[name] = row = self._free.pop()
        self._tasks[row] = task

    def finished(self, name: str, response: Sequence[int]) -> None:
        """Record that a request has ended."""
        row = self._rows.pop(name)
        self.drafter.released([row], [response])
        self._tasks[row] = None
        self._seated[row] = False
        self._free.append(row)

    def propose(
        self, names: Sequence[str], sampled: Sequence[Sequence[int]], tried: Sequence[int], requests: Any
    ) -> list[list[int]]:
        """Return the drafts of the next pass for each request of vLLM's batch; an empty list means none.

        Args:
            names: names of the requests, in the batch's order.
            sampled: tokens that the last pass sampled for each; none while its prompt is not fully computed.
            tried: drafts that the last pass tried for each.
            requests: vLLM's record of each request, by name.
        """
        drafts: list[list[int]] = [[] for _ in sampled]
        places = {self._rows[name]: place for place, name in enumerate(names) if sampled[place] and name in self._rows}
        active = np.array(sorted(places), dtype=np.int64)
        if not len(active):
            self._began = None
            return drafts
        self.passes += 1
        self.sequence_passes += len(active)
        self._take_in(active, places, sampled, tried)
        if self.drafter.on(len(active)):
            self._propose(active, places, [requests[names[places[row]]] for row in active.tolist()], drafts)
        else:
            self._seated[:] = False
        self._began = time.perf_counter()
        return drafts

    def _take_in(
        self, active: np.ndarray, places: dict[int, int], sampled: Sequence[Sequence[int]], tried: Sequence[int]
    ) -> None:
        """Tell the drafter which of its drafts were right."""
        known = active[self._seated[active]]
        # vLLM recomputes a request without a token. The drafter's row no longer matches it.
        lost = np.flatnonzero(self._seated)
        lost = lost[~np.isin(lost, known)]
        if len(lost):
            self.drafter.moved(lost, lost)
            self._seated[lost] = False
        if not len(known) or self._began is None:
            return
        at = [places[row] for row in known.tolist()]
        counts = np.array([len(sampled[place]) for place in at])
        tokens = np.concatenate([np.array(sampled[place], dtype=np.int64) for place in at])
        drafts = self._drafts
        if drafts is not None:
            # vLLM may have had no room for all of them.
            had = np.zeros(len(self._tasks), dtype=np.int64)
            had[known] = [tried[place] for place in at]
            kept = drafts.offsets <= had[drafts.slots]
            drafts = Drafts(drafts.slots[kept], drafts.offsets[kept], drafts.tokens[kept]) if kept.any() else None
        rows = len(active) + sum(tried[places[row]] for row in active.tolist())
        seconds = time.perf_counter() - self._began
        if len(known) < len(active):
            # The pass computed prompts as well, so its time says nothing about its rows.
            seconds = min(seconds, self.drafter.experience.costs.seconds(rows, rows - len(active)))
        self.drafter.sampled(known, counts, tokens, drafts, PassTiming(seconds, rows, len(active), len(active)))

    def _propose(
        self, active: np.ndarray, places: dict[int, int], records: Sequence[Any], drafts: list[list[int]]
    ) -> None:
        new_tokens = {row: record.output_token_ids for row, record in zip(active.tolist(), records, strict=True)}
        responses = np.array([len(self._task(row).response_tokens) + len(new) for row, new in new_tokens.items()])
        prompts = np.array([len(self._task(row).prompt_tokens) for row in new_tokens])

        def tokens_of(row: int) -> tuple[int, Sequence[int], Sequence[int]]:
            task = self._task(row)
            return task.prompt, task.prompt_tokens, [*task.response_tokens, *new_tokens[row]]

        remaining = self._longest_response - responses
        going_on = remaining > 0
        active, remaining = active[going_on], remaining[going_on]
        self._drafts = None
        widths: list[int] = []
        if len(active):
            # vLLM cuts the drafts of a request that would become too long, so that one has fewer rows than the others.
            room = self._positions - int((prompts + responses)[going_on].max())
            widths = [width for width in self._widths if width <= max(room, 1)]
            self._drafts = self.drafter.propose(
                active, remaining, tokens_of, len(active), lambda rows: rows, self._most_rows, widths
            )
        self._seated[:] = False
        self._seated[active] = True
        if self._drafts is None:
            return
        fits = self._drafts.offsets <= self._longest_draft
        for row, token in zip(self._drafts.slots[fits].tolist(), self._drafts.tokens[fits].tolist(), strict=True):
            drafts[places[row]].append(token)
        if widths:
            longest = next(width for width in widths if width > max(map(len, drafts))) - 1
            for row in active.tolist():
                drafts[places[row]] += [_FILLER] * (longest - len(drafts[places[row]]))

    def _task(self, row: int) -> SequenceTask:
        task = self._tasks[row]
        assert task is not None
        return task


class Proposer:
    """The class that vLLM asks for drafts (`speculative_config`, method `custom_class`).

    Args:
        vllm_config: vLLM's configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.requests: DraftedRequests | None = None
        self.tried: Sequence[int] = ()
        """Drafts that each request of the batch had in the last pass."""
        self._runner: Any = None

    def attach(self, runner: Any) -> None:
        """Read this model runner's batch from now on."""
        self._runner = runner
        # For a sequence near its longest length, vLLM would try zeros as the drafts of all sequences.
        runner.effective_drafter_max_model_len = 1 << 62

    def load_model(self, model: Any) -> None:
        """Do nothing: there is no model to load."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return drafts for each request of the batch."""
        if self.requests is None:
            return [[] for _ in sampled_token_ids]
        names = self._runner.input_batch.req_ids
        return self.requests.propose(names, sampled_token_ids, self.tried, self._runner.requests)
