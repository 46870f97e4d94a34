"""Characters of prompts that the tokenizer has no tokens for: the model reads `<unk>`, or nothing, in their place."""

import unicodedata
from collections.abc import Iterator, Mapping

from transformers import PreTrainedTokenizerBase

from rlhfless_functions.data.dataset_files import Table

_SHOWN = 8
_MAY_VANISH = ("Cc", "Cf", "Mn", "Mc", "Me", "Zs", "Zl", "Zp")
"""Categories of characters that tokenizers clean away or join with their neighbours: controls, accents, spaces."""


def lost_characters(table: Table, tokenizer: PreTrainedTokenizerBase, texts: Mapping[int, str]) -> Iterator[str]:
    """Yield a remark if the tokenizer loses characters of prompts; `texts` has the text of each row's number."""
    lost = {each for each in set().union(*texts.values()) if _is_lost(tokenizer, each)}
    texts = {number: text for number, text in texts.items() if not lost.isdisjoint(text)}
    spoilt = {number: found for number, text in texts.items() if (found := lost & _own(tokenizer, text))}
    if not spoilt:
        return
    first = next(iter(spoilt))
    ordered = sorted(spoilt[first]) + sorted(set().union(*spoilt.values()) - spoilt[first])
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    yield (
        f"{len(spoilt)} prompts have characters that the tokenizer does not know (first {table.where(first)}):"
        f" {', '.join(f'{each} (U+{ord(each):04X})' for each in ordered[:_SHOWN])}{more}. The model reads"
        f" {tokenizer.unk_token or 'nothing of use'} in their place: write them otherwise, or give model.tokenizer one"
        " that knows them"
    )


def _own(tokenizer: PreTrainedTokenizerBase, text: str) -> set[str]:
    """Return the characters of a text outside of special tokens, which have ids of their own."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return set(text)


def _is_lost(tokenizer: PreTrainedTokenizerBase, character: str) -> bool:
    if unicodedata.category(character) in _MAY_VANISH:
        return False
    ids = tokenizer.encode(character, add_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=True).strip() in ("", tokenizer.unk_token)
