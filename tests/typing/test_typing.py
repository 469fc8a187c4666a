"""The types as people's checkers see them: mypy and pyright, on what people write.

`accepted.py` is what they write, and strict checkers find nothing in it. `refused.py` has the mistakes, each on a line
with comments that silence both checkers; the comments are taken away, and exactly these lines must be reported. The
checkers see kconsume as it is installed, `py.typed` included.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

_HERE = Path(__file__).parent
_DEADLINE = 100.0
_SILENCED = {
    "mypy": re.compile(r"# type: ignore\[[\w\-, ]+\]"),
    "pyright": re.compile(r"# pyright: ignore\[[\w, ]+\]"),
}


class Finding(NamedTuple):
    file: str
    line: int
    message: str


def mypy(folder: Path) -> Iterator[Finding]:
    strict = ["--strict", "--config-file=", f"--cache-dir={folder / 'cache'}", "--output=json"]
    for line in _run(folder, ["mypy", *strict, f"--python-executable={sys.executable}"]).splitlines():
        found = json.loads(line)
        if found["severity"] == "error":
            yield Finding(Path(found["file"]).name, found["line"], found["message"])


def pyright(folder: Path) -> Iterator[Finding]:
    report = json.loads(_run(folder, ["pyright", "--outputjson", f"--pythonpath={sys.executable}"]))
    assert report["summary"]["filesAnalyzed"] == 2
    for found in report["generalDiagnostics"]:
        yield Finding(Path(found["file"]).name, found["range"]["start"]["line"] + 1, found["message"])


Checker = Callable[[Path], Iterator[Finding]]


@pytest.fixture(scope="module", params=[mypy, pyright])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Finding]]:
    """A checker, and all that it found, in one run over both files."""
    checker: Checker = request.param
    folder = tmp_path_factory.mktemp(checker.__name__)
    for sample in ("accepted.py", "refused.py"):
        (folder / sample).write_text(_unsilenced((_HERE / sample).read_text()))
    return checker.__name__, list(checker(folder))


def test_what_people_write_is_accepted(checked: tuple[str, list[Finding]]) -> None:
    _, found = checked
    assert [finding for finding in found if finding.file == "accepted.py"] == []


def test_every_mistake_is_found_and_nothing_else(checked: tuple[str, list[Finding]]) -> None:
    checker, found = checked
    lines = (_HERE / "refused.py").read_text().splitlines()
    mistakes = {number for number, line in enumerate(lines, 1) if _SILENCED[checker].search(line)}
    assert len(mistakes) > 40
    assert {finding.line for finding in found if finding.file == "refused.py"} == mistakes


def test_what_is_accepted_can_be_run_too() -> None:
    from tests.typing import accepted

    assert len(accepted.app.registrations) == 5


def _unsilenced(source: str) -> str:
    for silenced in _SILENCED.values():
        source = silenced.sub("#", source)
    return source


def _run(folder: Path, command: Sequence[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, "accepted.py", "refused.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_DEADLINE,
        check=False,
    )
    assert done.returncode == 1, f"{command[0]} did not do its work: {done.stdout}{done.stderr}"
    return done.stdout
