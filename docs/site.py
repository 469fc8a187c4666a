"""Adds pages from outside of `docs/` to the site, and corrects the links to them.

On GitHub, `../examples/orders/README.md` is a file of the repository. mkdocs knows only the files in `docs/`. So these
files are added to the site under the same names, and the targets of links are replaced. The text of a page does not
change.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/**/*.md", "examples/*/*.py")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, under their paths in the repository."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the target of each link by its place on the site."""
    here = page.file.src_uri
    inside = (Path(config.docs_dir) / here).is_file()
    folder = posixpath.dirname(f"docs/{here}" if inside else here)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1])).removeprefix("docs/")
        known = files.get_file_from_path(target) is not None
        return posixpath.relpath(target, posixpath.dirname(here) or ".") if known else link[1]

    return _LINK.sub(moved, markdown)
