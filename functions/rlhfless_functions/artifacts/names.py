"""Names of files that others wrote down: a manifest's, a store's keys, those of an index of weights.

A stranger's model has such names. A name that is absolute, or has `..` in it, would write and read anywhere.
"""

_LONGEST = 1024


def inside(name: object) -> str:
    """Return a name if it is a relative path that stays in its folder, in its only spelling.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
        raise ValueError(f"{_shown(name)} names no file")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{_shown(name)} leads out of its folder, or is not its shortest spelling")
    if "\\" in name or "::" in name or not name.isprintable():
        raise ValueError(f"{_shown(name)} has a backslash, `::` or a character that can't be printed")
    return name


def _shown(name: object) -> str:
    return ascii(name)[:200]
