"""`kconsume new`: makes a project with a handler, and a test that passes.

Checks the name and writes files from `templates/`. Changes no file that exists.
"""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from importlib.metadata import packages_distributions
from pathlib import Path
from string import Template

import click
import msgspec

from kconsume import __version__
from kconsume.cli.options import json_option
from kconsume.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_-]{0,38}[A-Za-z0-9])?")
_ORDER = '{"sku": "tea", "quantity": 2}'


class Made(msgspec.Struct):
    """The files that were made, and the commands to run next. `--json` prints it."""

    folder: str
    files: list[str]
    next: list[str]


@click.command(short_help="Make a project: a handler, and a test that passes.")
@click.argument("name")
@json_option
def new(name: str, as_json: bool) -> None:
    """Make a folder NAME with a project to start from.

    The project has a typed handler that writes through an SQLite transaction, a test of the handler that passes, a
    README and a pyproject.toml. It runs on an embedded broker, without a Kafka to install.

    \b
      kconsume new shop
      cd shop
      kconsume run shop.app:app --reload

    Exit code 2 if the name cannot be used, or the folder is not empty.
    """
    package = _package(name)
    folder = Path(name)
    _check_free(folder)
    files = _files(package)
    values = {
        "project": name,
        "package": package,
        "broker": package.lower().replace("_", "-"),
        "version": __version__,
    }
    for file, template in files.items():
        _write(folder / file, template, values)
    made = Made(name, sorted(files), _next(name, package))
    if as_json:
        click.echo(msgspec.json.encode(made))
    else:
        _print(made)


def _files(package: str) -> dict[str, str]:
    """Each file of the project, with its template."""
    return {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        ".gitignore": "gitignore.txt",
        f"{package}/__init__.py": "init.py.txt",
        f"{package}/app.py": "app.py.txt",
        "tests/test_app.py": "test_app.py.txt",
    }


def _package(name: str) -> str:
    """The name of the package. Raises `ConfigurationError` if it is invalid, or another package has it."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot name a project: use up to 40 letters, digits, - and _, starting with a letter and not "
            f"ending with - or _, as in kconsume new {_close_to(name)}"
        )
    package = name.replace("-", "_")
    if owner := _taken(package):
        raise ConfigurationError(
            f"{name!r} cannot name a project, because {package!r} is {owner}, and Python would import only one of the "
            f"two: choose another name, as in kconsume new {name}-service"
        )
    return package


def _taken(package: str) -> str | None:
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        return "Python's own"
    if package == "tests":
        return "where the tests are"
    return "installed here" if package in packages_distributions() else None


def _close_to(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", Path(name).name.lower())
    close = "-".join(words).lstrip("0123456789-")[:40].rstrip("-")
    return close or "shop"


def _check_free(folder: Path) -> None:
    try:
        used = any(folder.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError:
        used = True
    if used:
        raise ConfigurationError(f"{str(folder)!r} exists and is not empty: choose another name, or move it away first")


def _write(file: Path, template: str, values: dict[str, str]) -> None:
    text = resources.files("kconsume.cli").joinpath("templates", template).read_text(encoding="utf-8")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(Template(text).substitute(values), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{str(file)!r} cannot be written ({error.strerror}): change to a folder that you may write, and try again"
        ) from error


def _next(project: str, package: str) -> list[str]:
    return [
        f"cd {project} && python -m pytest",
        f"kconsume run {package}.app:app --reload",
        f"kconsume send orders '{_ORDER}' --app {package}.app:app",
    ]


def _print(made: Made) -> None:
    test, run, send = made.next
    click.echo(f"Made {made.folder}:")
    for file in made.files:
        click.echo(f"  {made.folder}/{file}")
    click.echo()
    click.echo(f"  {test}")
    click.echo("      runs the tests; if pytest is missing: python -m pip install pytest")
    click.echo(f"  {run}")
    click.echo("      consumes, and starts again when you edit the handler")
    click.echo(f"  {send}")
    click.echo("      sends an order, from a second terminal")
