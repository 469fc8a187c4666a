"""Splits the text of a kconsume error into the problem and the fix."""

from __future__ import annotations

import re

from kconsume.errors import KconsumeError

_QUOTED = re.compile(r"(?<!\w)(['\"`]).*?\1(?!\w)", re.DOTALL)
_BRACKETED = re.compile(r"\([^(){}\[\]]*\)|\{[^(){}\[\]]*\}|\[[^(){}\[\]]*\]")


def problem_and_fix(error: KconsumeError | str, otherwise: str) -> tuple[str, str]:
    """Split an error of the form `problem: fix`. A text without a fix is the problem as a whole.

    An error puts the words of a server or a driver in brackets, and a name in quotes. A colon in brackets or quotes
    does not divide the text: `(ERROR: no such table)`, `{partition: offset}`.

    Args:
        error: the error, or its text.
        otherwise: the fix of an error that names none.
    """
    text = str(error)
    problem, colon, _ = _without_insertions(text).rpartition(": ")
    return (text[: len(problem)], text[len(problem) + len(colon) :]) if problem else (text, otherwise)


def _without_insertions(text: str) -> str:
    """The text, of the same length, with everything in quotes and brackets covered."""
    text, found = _QUOTED.sub(_covered, text), 1
    while found:
        text, found = _BRACKETED.subn(_covered, text)
    return text


def _covered(match: re.Match[str]) -> str:
    return "_" * len(match.group())
