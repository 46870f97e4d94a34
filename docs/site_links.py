"""A hook of mkdocs: links to files outside docs/ lead to the repository, and a link to a missing file is a warning."""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.site_links")
UPWARDS = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with absolute links in place of those that leave docs/."""
    root = Path(config.config_file_path).parent
    folder = posixpath.dirname(page.file.src_uri)

    def absolute(link: re.Match[str]) -> str:
        path, anchor = posixpath.normpath(posixpath.join(folder, link[1])), link[2] or ""
        if not path.startswith("../"):
            return link[0]
        path = path.removeprefix("../")
        if not (root / path).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_path, link[1])
        return f"]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"

    return UPWARDS.sub(absolute, markdown)
