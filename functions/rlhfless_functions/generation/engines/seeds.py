"""The key from which all random numbers of a sample are computed. Without torch."""

import hashlib

from rlhfless_functions.api import Purpose


def sample_seed(seed: int, purpose: Purpose, step: int, prompt: int, index: int) -> int:
    """Return the sample's 64-bit key: BLAKE2b of its coordinates."""
    coordinates = f"{seed}/{purpose}/{step}/{prompt}/{index}"
    return int.from_bytes(hashlib.blake2b(coordinates.encode(), digest_size=8).digest(), "little")
