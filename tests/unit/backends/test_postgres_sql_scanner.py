"""Which texts of SQL end or begin a transaction, wherever the words stand, and however long the text is."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume.backends.postgres.sql_scanner import transaction_statement

ENDS = [
    ("commit", "commit"),
    ("COMMIT WORK", "commit"),
    ("commit and chain", "commit"),
    ("commit prepared 'x'", "commit"),
    ("end", "end"),
    ("end transaction", "end"),
    ("abort", "abort"),
    ("rollback", "rollback"),
    ("rollback work", "rollback"),
    ("rollback and chain", "rollback"),
    ("rollback prepared 'to'", "rollback"),
    ("begin", "begin"),
    ("begin isolation level serializable", "begin"),
    ("start transaction", "start transaction"),
    ("prepare transaction 'x'", "prepare transaction"),
    ("insert into seen values ('x'); commit", "commit"),
    (";commit", "commit"),
    ("; ; /* */ ; commit", "commit"),
    ("/*\n*/ commit", "commit"),
    ("/* a /* nested */ b */ commit", "commit"),
    ("-- a\ncommit", "commit"),
    ("-- a\rcommit", "commit"),
    ("select 1;--\ncommit;", "commit"),
    ("select 'it''s'; commit", "commit"),
    ("select E'it\\'s'; commit", "commit"),
    ("select e'\\\\'; commit", "commit"),
    ("select 'C:\\'; commit", "commit"),
    ("select E'a'\n -- b\n '\\''; commit", "commit"),
    ('select 1 as "a;b"; commit', "commit"),
    ("select $$;$$; commit", "commit"),
    ("select $a$ $$ $b$ $a$; commit", "commit"),
    ("select a$b$c from t; commit; select a$b$c from t", "commit"),
    ("create function f() returns int begin atomic select 1; end; commit", "commit"),
    ("create function f(int) returns int language sql as 'select 1'; commit", "commit"),
    ("savepoint a; release savepoint a; rollback to a; rollback", "rollback"),
]
STAYS = [
    "",
    ";",
    "select 1",
    "savepoint a",
    "release a",
    "rollback to a",
    "ROLLBACK TO SAVEPOINT a",
    "rollback work to a",
    "rollback transaction to savepoint a",
    "prepare x as select 1",
    "commitment",
    "commit_ment",
    "commité",
    "commit\u00a0x",
    '"commit"',
    "'commit'",
    "-- commit",
    "/* commit */",
    "/* /* */ ; commit */ select 1",
    "select '; commit'",
    "select ''';commit'''",
    "select E'\\'; commit --'",
    "select e'a'\n'\\'; commit --'",
    'select 1 as "; commit"',
    "select $$; commit$$",
    "select $a$; commit $$; commit$a$",
    "select 1 -- ; commit",
    "insert into t values (%s) -- end",
    "select case when true then 1 else 2 end",
    "do $$ begin null; end $$",
    "create function f() returns int begin atomic select 1; select case when true then 1 end; end",
    "create or replace procedure p() begin atomic insert into t values (1); end",
    "update t set begin = 1, start = 2",
]


@pytest.mark.parametrize(("text", "words"), ENDS)
def test_a_statement_that_ends_or_begins_one_is_found_wherever_it_stands(text: str, words: str) -> None:
    assert transaction_statement(text) == words


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_one_is_let_through(text: str) -> None:
    assert transaction_statement(text) is None


def test_where_backslashes_escape_a_plain_literal_is_read_that_way() -> None:
    hidden = r"select 'a\'' ; commit; --'"
    assert transaction_statement(hidden) is None
    assert transaction_statement(hidden, backslashes=True) == "commit"


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


ANYTHING = st.text(st.sampled_from("abcommit;'\"$/*- \n\\"), max_size=12)
COMMENTS = st.one_of(
    st.sampled_from([" ", "\t", "\n", "\r\n", "\f"]),
    ANYTHING.map(lambda text: "--" + text.replace("\n", " ").replace("\r", " ") + "\n"),
    st.recursive(
        ANYTHING.map(lambda text: text.replace("*", "x").replace("/", "x")),
        lambda inner: inner.map(lambda text: f"/*{text}*/"),
        max_leaves=3,
    ).map(lambda text: f"/*{text}*/"),
)
HARMLESS = st.one_of(
    # Behind a comma: a literal in the line after an E'' is its continuation, and backslashes escape in it, too.
    ANYTHING.map(lambda text: "," + literal(text)),
    ANYTHING.map(lambda text: "E'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"),
    ANYTHING.map(lambda text: '"' + text.replace('"', '""') + '"'),
    ANYTHING.map(lambda text: "$q$" + text.replace("$", "x") + "$q$"),
    st.sampled_from(["a", "1", "(", ")", "+", "commit", "end", "%s", "$1"]),
)
GAPS = st.lists(COMMENTS, max_size=3).map("".join)


@st.composite
def statements(draw: st.DrawFn, opening: tuple[str, ...]) -> str:
    """The words, then anything that stands inside one statement, with comments between any two parts."""
    parts = [*opening, *draw(st.lists(HARMLESS, max_size=5))]
    return draw(GAPS) + "".join(part + " " + draw(GAPS) for part in parts)


STAYING = st.sampled_from([("select",), ("insert", "into"), ("savepoint", "a"), ("rollback", "to"), ()]).flatmap(
    lambda opening: statements(opening) if opening else GAPS
)
ENDING = st.sampled_from([("commit",), ("end",), ("abort",), ("begin",), ("start", "transaction")])


@given(st.lists(STAYING, max_size=4))
def test_comments_and_quotes_anywhere_make_nothing_of_it(staying: list[str]) -> None:
    assert transaction_statement(";".join(staying)) is None


@given(st.lists(STAYING, max_size=3), ENDING, st.lists(STAYING, max_size=3), st.data())
def test_comments_and_quotes_anywhere_hide_nothing(
    before: list[str], opening: tuple[str, ...], after: list[str], data: st.DataObject
) -> None:
    last = data.draw(GAPS) + "".join(word + " " + data.draw(GAPS) for word in opening)
    assert transaction_statement(";".join([*before, last, *after])) == " ".join(opening)


@pytest.mark.parametrize(
    "piece", ["/*a*/", "/*", "--a", "-- ", "'", "E'", "$a$", "$", '"', "\\'", ";", " ", "case ", "E'' -- ", "('a')"]
)
def test_a_long_text_is_read_to_its_end(piece: str) -> None:
    """It would take years, if the time grew faster than the text."""
    text = piece * (200_000 // len(piece)) + " commit"
    assert transaction_statement(text) in (None, "commit")


def test_long_texts_are_not_kept() -> None:
    tracemalloc.start()
    try:
        for number in range(600):
            transaction_statement(f"select '{number}{'x' * 20_000}' as commit")
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 3_000_000
