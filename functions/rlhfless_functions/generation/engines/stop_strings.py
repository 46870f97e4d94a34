"""Stop strings, found in text that grows by a token at a time."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT_TOKENS = 5
"""Tokens to decode before those that could spell the stop string. A UTF-8 character may be split over four tokens, and
some tokenizers drop the space of the first token that they get."""


class StopStrings:
    """Finds stop strings that the newest token of a response completes.

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
        """Number of newest tokens on which the answer depends."""

    def ended(self, tails: list[list[int]]) -> list[bool]:
        """Return for each response, given its newest `window` tokens, whether its text now contains a stop string."""
        texts = self._tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [any(string in text for string in self._strings) for text in texts]

    def first_ends(self, before: Sequence[list[int]], sampled: Sequence[list[int]]) -> list[int | None]:
        """Return for each response that got several tokens at once the number of these tokens up to the one that
        completes a stop string, or None if none does.

        Args:
            before: each response's newest `window` tokens before the new ones.
            sampled: each response's new tokens, at least one.
        """
        tails = [
            [*known, *tokens[:end]][-self.window :]
            for known, tokens in zip(before, sampled, strict=True)
            for end in range(1, len(tokens) + 1)
        ]
        ended = iter(self.ended(tails))
        found = [[next(ended) for _ in tokens] for tokens in sampled]
        return [stops.index(True) + 1 if True in stops else None for stops in found]
