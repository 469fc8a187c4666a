"""What a package index shows: a README whose links work there, and the project's addresses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
URL = "https://git.example/kconsume"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metadata_of(pages: ModuleType) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    pages.ProjectPages(str(ROOT), {}).update(metadata)
    return metadata


def test_with_an_address_every_link_of_the_readme_is_absolute(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROJECT_URL", f"{URL}/")
    metadata = metadata_of(pages)
    text = metadata["readme"]["text"]
    links = re.findall(r"\]\(([^)#][^)]*)\)", text)
    assert len(links) > 40
    assert [link for link in links if not link.startswith(URL)] == []
    assert f"]({URL}/raw/main/docs/one-transaction.svg)" in text
    assert f"[a service of your own in ten minutes]({URL}/blob/main/docs/tutorial.md)" in text
    targets = [link.removeprefix(f"{URL}/blob/main/").removeprefix(f"{URL}/raw/main/") for link in links]
    assert [target for target in targets if not (ROOT / target.partition("#")[0]).exists()] == []
    assert metadata["urls"]["Source"] == URL


def test_without_one_the_readme_is_as_it_stands_and_no_address_is_invented(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROJECT_URL", raising=False)
    metadata = metadata_of(pages)
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()
    assert metadata["urls"] == {}


def test_addresses_and_anchors_stay_as_they_are(pages: ModuleType) -> None:
    text = "[a](https://x.example/y) [b](#install) [c](docs/c.md#d) ![p](docs/p.svg)"
    assert pages.with_absolute_links(text, URL) == (
        f"[a](https://x.example/y) [b](#install) [c]({URL}/blob/main/docs/c.md#d) ![p]({URL}/raw/main/docs/p.svg)"
    )
