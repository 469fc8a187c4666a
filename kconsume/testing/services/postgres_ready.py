"""Ask a PostgreSQL, or what stands before one, whether it can be worked with."""

from __future__ import annotations

from kconsume.errors import ServiceUnavailable

_CONNECT_SECONDS = 2  # libpq takes no less


def answers(url: str) -> str | None:
    """None when a query is answered, else why it is not; see `ready.Answers`."""
    try:
        import psycopg
    except ImportError as missing:
        raise ServiceUnavailable(
            "A PostgreSQL for tests needs its driver, which is not installed; run `pip install 'kconsume[postgres]'`."
        ) from missing
    try:
        with psycopg.connect(url, connect_timeout=_CONNECT_SECONDS, autocommit=True) as connection:
            connection.execute("select 1")
    except psycopg.OperationalError as refused:
        return " ".join(str(refused).split())
    return None
