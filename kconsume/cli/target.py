"""From `shop:app` on the command line to the person's `App`.

Imports their module and says what is wrong when that cannot be done; runs nothing of it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import click

import kconsume
from kconsume.app import App
from kconsume.errors import ConfigurationError, KconsumeError

VARIABLE = "KCONSUME_APP"

_OURS = str(Path(kconsume.__file__).parent)

Command = TypeVar("Command", bound=Callable[..., object])


def app_argument(command: Command) -> Command:
    """The argument APP, which `load` takes."""
    return click.argument("app", required=False, envvar=VARIABLE, metavar="[APP]")(command)


def load(text: str | None) -> App:
    """The `App` behind MODULE:ATTRIBUTE; the attribute is `app` if it is left out.

    Leaves the full name in KCONSUME_APP, for the line that a failure prints to be seen again.
    """
    module_name, _, attribute = (text or "").partition(":")
    if not module_name:
        raise ConfigurationError(f"which app? Write MODULE:APP, as in shop:app, or set {VARIABLE}=shop:app")
    attribute = attribute or "app"
    app = _attribute(_module(module_name), attribute)
    os.environ[VARIABLE] = f"{module_name}:{attribute}"
    return app


def _module(name: str) -> ModuleType:
    if name.endswith(".py") or os.sep in name:
        raise ConfigurationError(f"{name!r} is a file, and a module is wanted: write {_dotted(name)}:app")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(_not_found(name)) from error
        raise ConfigurationError(
            f"{name} was found, but it imports {error.name!r}, which is not installed here{_place(error)}: install "
            f"it in {sys.prefix}, or correct the import"
        ) from error
    except KconsumeError as error:
        error.add_note(f"while {name} was imported{_place(error)}")
        raise
    except Exception as error:
        broken = ConfigurationError(f"{name} cannot be imported: {type(error).__name__}: {error}{_place(error)}")
        broken.add_note(_trace(error))
        raise broken from error


def _attribute(module: ModuleType, attribute: str) -> App:
    found = getattr(module, attribute, None)
    if isinstance(found, App):
        return found
    apps = sorted(name for name, value in vars(module).items() if isinstance(value, App))
    what = "has no" if found is None else f"has a {type(found).__name__}, and not an App, under the name"
    fix = " or ".join(f"{module.__name__}:{name}" for name in apps)
    raise ConfigurationError(
        f"{module.__name__} ({_short(module.__file__)}) {what} {attribute!r}: "
        + (f"write {fix}" if apps else "make one there, as in app = App('localhost:9092', group='shop')")
    )


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removeprefix(f".{os.sep}").strip(os.sep).replace(os.sep, ".")


def _not_found(name: str) -> str:
    here = Path.cwd()
    near = {path.stem for path in (*here.glob("*.py"), *here.glob("*/__init__.py"))}
    close = difflib.get_close_matches(name, near, n=1)
    fix = f"did you mean {close[0]!r}?" if close else "go to the folder that holds it, or correct the name"
    return f"there is no module {name!r} in {here} or on Python's path: {fix}"


def _place(error: BaseException) -> str:
    """Where in the person's own files it happened, as `, in shop.py, line 3`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    if isinstance(error, SyntaxError):
        return ""  # it says so itself
    return f", in {_short(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""


def _trace(error: Exception) -> str:
    """The traceback from the person's first frame on."""
    trace = error.__traceback__
    while trace is not None and not _is_theirs(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace))).rstrip()


def _is_theirs(file: str) -> bool:
    return not file.startswith((_OURS, "<frozen importlib")) and file != importlib.__file__


def _short(file: str | None) -> str:
    """A path as a person in this folder would write it."""
    path, here = Path(file or "?"), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
