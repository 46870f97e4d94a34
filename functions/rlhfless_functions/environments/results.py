"""Texts of environments as the model reads them."""


def cut(text: str, longest: int) -> str:
    """Return a text with its first bytes alone, and a note that there was more."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= longest:
        return encoded.decode(errors="replace")
    return f"{encoded[:longest].decode(errors='ignore')}… (cut off: {len(encoded)} bytes, at most {longest} are shown)"
