"""Hooks of mkdocs: pages of the repository outside of docs/ join the site, and links between all of them fit."""

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
"""Pages of the site that are not in docs/, and their files."""
MERMAID = "javascripts/mermaid.tiny.js"
"""Draws the pages' diagrams. The theme would load it from unpkg.com, unless the page has it already."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of a page, as they are right in the repository, become those of the site."""
    return rewritten(markdown, page.file.src_uri, str(config.repo_url or ""))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Pages with diagrams bring what draws them; it has 2.5 MB, which the others do without."""
    if 'class="mermaid"' not in output:
        return output
    script = posixpath.relpath(MERMAID, posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)


def rewritten(markdown: str, page: str, repository: str) -> str:
    """`page`: its path in the site. A file that is no page is linked in the repository, or only named."""
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
