"""Responses of earlier steps that are loaded into a run's index.

Only speed depends on them. Files that are missing, damaged, or from another tokenizer are skipped with a line in the
log, and generation never waits for them.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Thread

from transformers import PreTrainedTokenizerBase

from rlhfless_functions import artifacts
from rlhfless_functions.data.draft_history import KnownResponse, read_draft_history, vocabulary_digest

_KEPT_TOKENS = 1 << 22
"""Tokens of parts in an instance's cache, which lets it read each part once."""
_CHUNK_TOKENS = 1 << 14
"""Tokens handed over at a time."""

logger = logging.getLogger(__name__)


class HistoryCache:
    """Parts that an instance has read. The least recently used ones are dropped first."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, list[KnownResponse]] = OrderedDict()
        self._tokens = 0

    def read(self, uri: str, tokenizer: str) -> list[KnownResponse]:
        """Return the responses of a part.

        Raises:
            ArtifactError: if it can't be read.
            ValueError: if its tokens belong to another tokenizer.
        """
        if uri in self._parts:
            self._parts.move_to_end(uri)
            return self._parts[uri]
        responses = read_draft_history(uri, tokenizer)
        self._parts[uri] = responses
        self._tokens += _size(responses)
        while self._tokens > _KEPT_TOKENS and len(self._parts) > 1:
            self._tokens -= _size(self._parts.popitem(last=False)[1])
        return responses


class HistoryLoader:
    """Reads the responses that a run may use in a thread of its own, and passes them on in pieces.

    Args:
        folders: folders of the steps, in the order in which they are read. Of equal n-grams the last counts.
        prompts: rows of the run's prompts. From the last folder, responses to any prompt are taken.
        tokenizer: digest of the engine's tokenizer.
        cache: the engine's cache.
    """

    def __init__(
        self, folders: Sequence[str], prompts: Collection[int], tokenizer: PreTrainedTokenizerBase, cache: HistoryCache
    ) -> None:
        self._folders = list(folders)
        self._prompts = set(prompts)
        self._tokenizer = tokenizer
        self._cache = cache
        self._found: SimpleQueue[list[KnownResponse]] = SimpleQueue()
        self.unreadable = 0
        """Parts and folders that could not be used."""
        self._thread = Thread(target=self._read, name="drafts", daemon=True)
        self._thread.start()

    def take(self) -> list[KnownResponse]:
        """Return a piece of the responses that have arrived since the last call; empty if there are none."""
        try:
            return self._found.get_nowait()
        except Empty:
            return []

    def _read(self) -> None:
        try:
            tokenizer = vocabulary_digest(self._tokenizer.get_vocab())
            with ThreadPoolExecutor(8) as pool:
                listed = list(pool.map(self._list, self._folders))
                parts = [(part, number == len(listed) - 1) for number, found in enumerate(listed) for part in found]
                for (_, is_last), responses in zip(
                    parts, pool.map(lambda part: self._part(part[0], tokenizer), parts), strict=True
                ):
                    self._hand_over(each for each in responses if is_last or each.prompt in self._prompts)
        except Exception as error:
            # If the thread fails, only the drafts are lost.
            self._pass_over("drafts", error)

    def _list(self, folder: str) -> list[str]:
        try:
            return [uri for uri in artifacts.list_files(folder) if uri.endswith(".parquet")]
        except artifacts.ArtifactError as error:
            self._pass_over(folder, error)
            return []

    def _part(self, uri: str, tokenizer: str) -> list[KnownResponse]:
        try:
            return self._cache.read(uri, tokenizer)
        except (artifacts.ArtifactError, ValueError) as error:
            self._pass_over(uri, error)
            return []

    def _pass_over(self, what: str, error: Exception) -> None:
        self.unreadable += 1
        logger.warning(
            "responses of an earlier step can't be used for drafts; generation continues without them",
            extra={"fields": {"uri": what, "reason": str(error)}},
        )

    def _hand_over(self, responses: Iterable[KnownResponse]) -> None:
        chunk: list[KnownResponse] = []
        size = 0
        for response in responses:
            chunk.append(response)
            size += len(response.tokens)
            if size >= _CHUNK_TOKENS:
                self._found.put(chunk)
                chunk, size = [], 0
        if chunk:
            self._found.put(chunk)


def _size(responses: Iterable[KnownResponse]) -> int:
    return sum(len(each.tokens) for each in responses)
