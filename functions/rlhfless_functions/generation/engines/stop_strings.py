"""Stop strings, found in text that grows by a token at a time."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 5
"""Tokens decoded before those that could spell the stop string: a UTF-8 character may be split over four tokens, and
some tokenizers drop the space of the first token that they are given."""


class StopStrings:
    """Whether the newest token of a response completes a stop string.

    Only the end of the response is decoded: a stop string of n bytes is spelled by at most n tokens. The answer depends
    on the tokens alone, so a response that moves to another engine ends at the same token.

    Args:
        tokenizer: of the model.
        strings: at least one, none empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self.window = max(len(string.encode()) for string in strings) + CONTEXT_TOKENS
        """Newest tokens that the answer depends on."""

    def ended(self, tails: list[list[int]]) -> list[bool]:
        """For each response, given its newest `window` tokens: does its text now contain a stop string?"""
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [any(string in text for string in self._strings) for text in texts]
