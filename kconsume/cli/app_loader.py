"""Loads the `App` that a command line names, such as `shop:app`.

Imports the user's module, and explains an import that fails. Does not run the app.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

import kconsume
from kconsume.app import App
from kconsume.errors import ConfigurationError, KconsumeError

VARIABLE = "KCONSUME_APP"

_PACKAGE = str(Path(kconsume.__file__).parent)


def load(text: str | None) -> App:
    """Return the `App` that a user names. Raises `ConfigurationError` if it cannot be imported.

    Sets `KCONSUME_APP` to MODULE:ATTRIBUTE: the report of a failed record prints a `kconsume try` command with it.

    Args:
        text: MODULE or MODULE:ATTRIBUTE. The default ATTRIBUTE is `app`.
    """
    module_name, _, attribute = (text or "").partition(":")
    if not module_name:
        raise ConfigurationError(f"no app was named: write MODULE:APP, as in shop:app, or set {VARIABLE}=shop:app")
    attribute = attribute or "app"
    app = _attribute(_module(module_name), attribute)
    os.environ[VARIABLE] = f"{module_name}:{attribute}"
    return app


def _module(name: str) -> ModuleType:
    if name.endswith(".py") or os.sep in name:
        raise ConfigurationError(f"{name!r} is a file, not a module: write {_dotted(name)}:app")
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
    what = "has no" if found is None else f"has a {type(found).__name__}, not an App, under the name"
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
    """Where the error was raised in the user's files, as `, in shop.py, line 3`. Empty if in none of them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if isinstance(error, SyntaxError):
        return ""  # the text of a SyntaxError has the file and the line
    return f", in {_short(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""


def _trace(error: Exception) -> str:
    """The formatted traceback, without the frames before the user's first frame."""
    trace = error.__traceback__
    while trace is not None and not _is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace))).rstrip()


def _is_users(file: str) -> bool:
    # "<string>" is code that a library has generated, such as the `__init__` of a dataclass.
    return not file.startswith((_PACKAGE, "<")) and file != importlib.__file__


def _short(file: str | None) -> str:
    """The path relative to the current folder, if it is inside this folder."""
    path, here = Path(file or "?"), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
