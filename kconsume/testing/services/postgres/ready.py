"""Ask a PostgreSQL, or the PgBouncer in front of one, whether it is ready."""

from __future__ import annotations

from kconsume.errors import ServiceUnavailable

_CONNECT_SECONDS = 2  # libpq accepts no smaller value


def answers(url: str) -> str | None:
    """Return None if a query is answered, else the reason why it is not. As `ready.Answers`."""
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
