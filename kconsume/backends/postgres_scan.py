"""Whether a text of SQL ends, or begins, a transaction: read as PostgreSQL's own scanner reads it, in one pass.

Only what stands where a statement begins counts: words in comments, literals, quoted names and bodies of functions do
not. A text that PostgreSQL would not accept may be judged either way, for nothing of it is carried out. Nothing is
sent from here, and no connection is known.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

_KEPT_UP_TO = 2_000
"""Characters of a text whose verdict is remembered: longer ones are seldom the same twice, and fill the memory."""

_SUSPECT = re.compile(r"commit|end|abort|rollback|begin|start|prepare", re.IGNORECASE)
"""In a text without any of these there is nothing to find."""

# PostgreSQL's white space, and what it takes for a letter: every character beyond ASCII, a no-break space included.
_SPACE = re.compile(r"[ \t\n\r\f\v]+")
_WORD = re.compile(r"[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*")
_LINE_END = re.compile(r"[\n\r]")
_TAG = re.compile(r"\$(?:[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_\x80-\U0010ffff]*)?\$")
_IN_COMMENT = re.compile(r"/\*|\*/")
_IN_ESCAPED = re.compile(r"['\\]")
# Literals with a line break between them are one, also for what a backslash means in the second.
_CONTINUED = re.compile(r"(?:[ \t\f\v]|--[^\n\r]*+)*+[\n\r](?:[ \t\n\r\f\v]|--[^\n\r]*+[\n\r])*+'")


def ending(text: str, *, backslashes: bool = False) -> str | None:
    """The words by which a statement of the text ends or begins a transaction, as a person writes them; None if none
    does. `backslashes`: whether they escape in plain literals too, as with `standard_conforming_strings` off.

    Savepoints are the handler's own business: the transaction around them stays.
    """
    if len(text) > _KEPT_UP_TO:
        return _found(text, backslashes)
    return _remembered(text, backslashes and "\\" in text)


def _found(text: str, backslashes: bool) -> str | None:
    if _SUSPECT.search(text) is None:
        return None
    for words in _openings(text, backslashes):
        if (verdict := _verdict(words)) is not None:
            return verdict
    return None


_remembered = functools.lru_cache(maxsize=512)(_found)


def _verdict(words: list[str]) -> str | None:
    """Of the words with which a statement opens."""
    first, second, third = [*words, "", "", ""][:3]
    if first in ("commit", "end", "abort", "begin"):
        return first
    if (first, second) in (("start", "transaction"), ("prepare", "transaction")):
        return f"{first} {second}"
    if first == "rollback" and "to" not in (second, third if second in ("work", "transaction") else ""):
        return first
    return None


def _openings(text: str, backslashes: bool) -> Iterator[list[str]]:
    """The first words of each statement, up to what is no word."""
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
    """How deep in the body of a `create function … begin atomic …; …; end` we are: its semicolons end no statement."""

    def __init__(self) -> None:
        self.depth = 0
        self._parens = 0
        self._last = ""

    def read(self, token: str, opening: list[str]) -> None:
        if token in "()":
            self._parens += 1 if token == "(" else -1
        elif self.depth:
            self.depth += {"case": 1, "end": -1}.get(token, 0)
        elif self._last == "begin" and token == "atomic" and not self._parens and _makes_a_routine(opening):
            self.depth = 1
        self._last = token


def _makes_a_routine(opening: list[str]) -> bool:
    return opening[:1] == ["create"] and not {"function", "procedure"}.isdisjoint(opening)


def _tokens(text: str, backslashes: bool) -> Iterator[str]:
    """Words in small letters, `;`, parentheses, and `.` for whatever else; comments and white space are left out."""
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
    """Two quotes in a name are taken for the end of one name and the beginning of another, which comes to the same."""
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
