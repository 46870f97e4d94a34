"""Responses that later visits of a prompt may resemble, as Parquet files: the source of drafts. Without torch.

Preparation writes a part for each chunk. Only speed depends on them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rlhfless_functions.data.parquet import read_table, values, write_table
from rlhfless_functions.data.rollouts import GeneratedSample

PROMPT_END = 16
"""Most tokens kept from the end of a prompt."""
LONGEST = 1 << 14
"""Most tokens kept of a response."""

SCHEMA = pa.schema(
    [
        pa.field("prompt", pa.int64(), nullable=False),
        pa.field("prompt_end", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("tokenizer", pa.string(), nullable=False),
    ]
)
"""Columns of a part: a row for each response."""


@dataclass(frozen=True)
class KnownResponse:
    """A response to a prompt."""

    prompt: int
    """Row of the prompt."""
    prompt_end: Sequence[int]
    """The prompt's last tokens, to which the beginnings of responses are matched."""
    tokens: Sequence[int]


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Return a digest that identifies a tokenizer's token ids."""
    tokens = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.blake2b(repr(tokens).encode(), digest_size=16).hexdigest()


def write_draft_history(uri: str, responses: Sequence[GeneratedSample], tokenizer: str) -> None:
    """Write a part, atomically.

    Args:
        uri: the part.
        responses: responses to any prompts.
        tokenizer: the digest of its vocabulary.

    Raises:
        ArtifactUnwritableError: it can't be written.
    """
    columns = {
        "prompt": [each.prompt for each in responses],
        "prompt_end": [each.prompt_tokens[-PROMPT_END:] for each in responses],
        "tokens": [each.response_tokens[:LONGEST] for each in responses],
        "tokenizer": [tokenizer] * len(responses),
    }
    write_table(uri, columns, SCHEMA)


def read_draft_history(uri: str, tokenizer: str) -> list[KnownResponse]:
    """Read a part.

    Raises:
        ArtifactError: it can't be read.
        ValueError: its tokens belong to another tokenizer.
    """
    table = read_table(uri, SCHEMA)
    if set(table["tokenizer"].to_pylist()) - {tokenizer}:
        raise ValueError("its tokens belong to another tokenizer")
    columns = (values(table[name]) for name in ("prompt", "prompt_end", "tokens"))
    return [KnownResponse(*row) for row in zip(*columns, strict=True)]
