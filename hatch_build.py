"""What the packages say of the project: the README and the project's addresses.

A package index shows the README without the repository, so links in it must be absolute. The address of the repository
comes from PROJECT_URL (`make dist URL=...`). Without it, as in a clone, the README stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:|#)([^)]+)(\))")
_LINK = re.compile(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)([^)]+)(\))")


class ProjectPages(MetadataHookInterface):
    """Fills in `readme` and `urls` of pyproject.toml."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        url = os.environ.get("PROJECT_URL", "").rstrip("/")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, url) if url else text}
        metadata["urls"] = project_urls(url) if url else {}


def with_absolute_links(text: str, url: str) -> str:
    """Return a page whose relative links lead to the repository at `url`."""
    text = _IMAGE.sub(rf"\g<1>{url}/raw/main/\g<2>\g<3>", text)
    return _LINK.sub(rf"\g<1>{url}/blob/main/\g<2>\g<3>", text)


def project_urls(url: str) -> dict[str, str]:
    """Return the addresses that a package index shows beside the README."""
    return {
        "Source": url,
        "Documentation": f"{url}/blob/main/docs/index.md",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
