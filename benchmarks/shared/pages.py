"""Tables that benchmarks write into pages of the documentation."""

from pathlib import Path


def replace_between(page: Path, name: str, text: str) -> None:
    """Replace what stands in a page between `<!-- NAME -->` and `<!-- end of NAME -->`.

    Raises:
        ValueError: if the page has no such marks.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before = page.read_text()
    if begin not in before or end not in before:
        raise ValueError(f"{page} has no marks {begin.strip()} and {end}: put them where the tables belong")
    head, _, rest = before.partition(begin)
    page.write_text(f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
