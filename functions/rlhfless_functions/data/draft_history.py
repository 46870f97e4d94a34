"""Responses that later visits of a prompt may go like, as Parquet: what drafts are made from. No torch here.

Preparation writes a part for each chunk. Nothing but speed depends on them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rlhfless_functions.data.parquet import read_table, values, write_table
from rlhfless_functions.data.rollouts import Rollout

PROMPT_END = 16
"""Tokens that are kept of the end of a prompt."""
LONGEST = 1 << 14
"""Tokens that are kept of a response."""

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
    """The prompt's last tokens, which tell how responses to it begin."""
    tokens: Sequence[int]


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """What tells the token ids of one tokenizer from another's."""
    tokens = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.blake2b(repr(tokens).encode(), digest_size=16).hexdigest()


def write_draft_history(uri: str, responses: Sequence[Rollout], tokenizer: str) -> None:
    """Write a part, atomically.

    Args:
        uri: the part.
        responses: of any prompts.
        tokenizer: the digest of its vocabulary.

    Raises:
        ArtifactUnwritableError: if it cannot be written.
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
        ArtifactError: if it cannot be read.
        ValueError: if its tokens are another tokenizer's.
    """
    table = read_table(uri, SCHEMA)
    if set(table["tokenizer"].to_pylist()) - {tokenizer}:
        raise ValueError("its tokens are another tokenizer's")
    columns = (values(table[name]) for name in ("prompt", "prompt_end", "tokens"))
    return [KnownResponse(*row) for row in zip(*columns, strict=True)]
