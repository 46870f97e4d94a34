"""A hook of mkdocs: links to files outside docs/ lead to the repository, and a link to a missing file is a warning."""

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.site_links")
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text with absolute links in place of `../PATH`."""
    root = Path(config.config_file_path).parent

    def absolute(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if not (root / path).exists():
            log.warning("%s links to ../%s, which does not exist", page.file.src_path, path)
        return f"]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})"

    return OUTSIDE.sub(absolute, markdown)
