"""mkdocs hooks that add pages from outside docs/ to the site and adapt all links."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "chart.md": "charts/ddpjob-operator/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
"""The site's pages that are not in docs/, and their files."""
MERMAID = "javascripts/mermaid.tiny.js"
"""The script that draws diagrams. The theme loads it from unpkg.com unless the page includes it."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace a page's links, which are relative to the repository, with links for the site."""
    return rewritten(markdown, page.file.src_uri, str(config.repo_url or ""))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Add the diagram script to pages that have diagrams. It takes 2.5 MB, so other pages omit
    it.
    """
    if 'class="mermaid"' not in output:
        return output
    script = posixpath.relpath(MERMAID, posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)


def rewritten(markdown: str, page: str, repository: str) -> str:
    """Return the text with links for the site. `page` is the page's path in the site.

    A file that is not a page of the site is linked in the repository. Without a repository, only
    its name is shown.
    """
    source = PAGES.get(page, f"docs/{page}")
    pages = {file: name for name, file in PAGES.items()}

    def link(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        inside = pages.get(file) or (file.removeprefix("docs/") if re.match(r"docs/.*\.(md|png|svg)$", file) else None)
        if inside is not None:
            return f"{picture}[{text}]({posixpath.relpath(inside, posixpath.dirname(page) or '.')}{hash_}{anchor})"
        if repository:
            return f"{picture}[{text}]({repository.rstrip('/')}/blob/main/{file}{hash_}{anchor})"
        return text if text.strip("`") == file else f"{text} (`{file}`)"

    return _LINK.sub(link, markdown)
