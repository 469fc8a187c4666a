"""Finds statements in a text of SQL that end or begin a transaction. Scans the text as PostgreSQL does, in one pass.

Only words at the beginning of a statement count; words in comments, literals, quoted names and function bodies do not.
If PostgreSQL rejects the text, any result is right, because PostgreSQL executes nothing of the text. Pure: no
connection, no I/O.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

_CACHED_UP_TO = 2_000
"""The most characters of a text whose result is cached. Longer texts seldom repeat, and would fill the memory."""

_SUSPECT = re.compile(r"commit|end|abort|rollback|begin|start|prepare", re.IGNORECASE)
"""Fast path: a text without any of these words does not end or begin a transaction."""

# PostgreSQL's white space. PostgreSQL reads every character beyond ASCII as a letter, also a no-break space.
_SPACE = re.compile(r"[ \t\n\r\f\v]+")
_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*")
_LINE_END = re.compile(r"[\n\r]")
_TAG = re.compile(r"\$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*)?\$")
_IN_COMMENT = re.compile(r"/\*|\*/")
_IN_ESCAPED = re.compile(r"['\\]")
# Two literals with a line break between them are one literal. The first part decides what a backslash means in both.
_CONTINUED = re.compile(r"(?:[ \t\f\v]|--[^\n\r]*+)*+[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*+[\n\r])*+'")


def transaction_statement(text: str, *, backslashes: bool = False) -> str | None:
    """The first words of the statement that ends or begins a transaction, in lower case; None if there is none.

    Args:
        text: one statement or several.
        backslashes: True if backslashes escape in plain literals too, as with `standard_conforming_strings` off.

    Savepoints are allowed: the transaction around them stays open.
    """
    if len(text) > _CACHED_UP_TO:
        return _scan(text, backslashes)
    return _cached_scan(text, backslashes and "\\" in text)


def _scan(text: str, backslashes: bool) -> str | None:
    if _SUSPECT.search(text) is None:
        return None
    for words in _first_words(text, backslashes):
        if (found := _transaction_words(words)) is not None:
            return found
    return None


_cached_scan = functools.lru_cache(maxsize=512)(_scan)


def _transaction_words(words: list[str]) -> str | None:
    """words: the first words of one statement."""
    first, second, third = [*words, "", "", ""][:3]
    if first in ("commit", "end", "abort", "begin"):
        return first
    if (first, second) in (("start", "transaction"), ("prepare", "transaction")):
        return f"{first} {second}"
    if first == "rollback" and "to" not in (second, third if second in ("work", "transaction") else ""):
        return first
    return None


def _first_words(text: str, backslashes: bool) -> Iterator[list[str]]:
    """The first words of each statement: at most four, and only those before the first token that is not a word."""
    words: list[str] = []
    is_open = True
    body = _Body()
    for token in _tokens(text, backslashes):
        if token == ";" and not body.depth:
            yield words
            words, is_open, body = [], True, _Body()
            continue
        is_word = token[0] not in ";()."
        if is_open and is_word and len(words) < 4:
            words.append(token)
        else:
            is_open = False
        body.read(token, words)
    yield words


class _Body:
    """The nesting depth in the body of a `create function … begin atomic …; …; end`. Semicolons in this body do not end
    the statement."""

    def __init__(self) -> None:
        self.depth = 0
        self._parens = 0
        self._last = ""

    def read(self, token: str, opening: list[str]) -> None:
        if token in "()":
            self._parens += 1 if token == "(" else -1
        elif self.depth:
            self.depth += {"case": 1, "end": -1}.get(token, 0)
        elif self._last == "begin" and token == "atomic" and not self._parens and _creates_routine(opening):
            self.depth = 1
        self._last = token


def _creates_routine(opening: list[str]) -> bool:
    return opening[:1] == ["create"] and not {"function", "procedure"}.isdisjoint(opening)


def _tokens(text: str, backslashes: bool) -> Iterator[str]:
    """Words in lower case, `;`, parentheses, and `.` for anything else, without comments and white space."""
    at, end = 0, len(text)
    while at < end:
        char = text[at]
        if space := _SPACE.match(text, at):
            at = space.end()
        elif text.startswith("--", at):
            at = _after(_LINE_END, text, at)
        elif text.startswith("/*", at):
            at = _after_comment(text, at)
        elif char == "'" or (char in "eE" and text.startswith("'", at + 1)):
            at = _after_literal(text, at, backslashes)
            yield "."
        elif char == '"':
            at = _after_quoted(text, at + 1, '"')
            yield "."
        elif char == "$" and (tag := _TAG.match(text, at)):
            at = _after_quoted(text, tag.end(), tag.group())
            yield "."
        elif word := _WORD.match(text, at):
            at = word.end()
            yield word.group().lower()
        else:
            at += 1
            yield char if char in ";()" else "."


def _after(mark: re.Pattern[str], text: str, at: int) -> int:
    found = mark.search(text, at)
    return len(text) if found is None else found.end()


def _after_quoted(text: str, at: int, mark: str) -> int:
    """The position after the next `mark`, which ends a quoted name, a literal or a function body. Two quotes inside a
    name are read as the end of one name and the beginning of another, with the same result."""
    found = text.find(mark, at)
    return len(text) if found < 0 else found + len(mark)


def _after_comment(text: str, at: int) -> int:
    depth = 0
    while found := _IN_COMMENT.search(text, at):
        at = found.end()
        depth += 1 if found.group() == "/*" else -1
        if not depth:
            return at
    return len(text)


def _after_literal(text: str, at: int, backslashes: bool) -> int:
    escaped = text[at] != "'"
    at += 2 if escaped else 1
    if not escaped and not backslashes:
        return _after_quoted(text, at, "'")
    while found := _IN_ESCAPED.search(text, at):
        at = found.end()
        if found.group() == "\\":
            at += 1
        elif again := _CONTINUED.match(text, at):
            at = again.end()
        elif text.startswith("'", at):
            at += 1
        else:
            return at
    return len(text)
