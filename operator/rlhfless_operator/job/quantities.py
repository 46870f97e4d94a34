"""Quantities as Kubernetes writes them."""

import re

_QUANTITY = re.compile(r"([0-9.]+)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_FACTORS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{prefix}i": 1024.0 ** (number + 1) for number, prefix in enumerate("KMGTP")
}


def quantity(text: str) -> float:
    """Convert a quantity to a number.

    Raises:
        ValueError: the text is not a quantity.
    """
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is not a quantity")
    return float(found[1]) * _FACTORS.get(found[2] or "", 1.0)
