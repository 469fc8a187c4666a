"""`kconsume try` with handlers that get a session of SQLAlchemy, or an awaited connection."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.conftest import Shop

APP = """
    import psycopg
    from sqlalchemy import create_engine, text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    from kconsume import App
    from kconsume.backends import PostgresStore

    URL = "{url}"
    ENGINE_URL = URL.replace("postgresql://", "postgresql+psycopg://", 1)
    app = App("embedded://shop", group="shop", offsets={store})

    @app.consume("orders")
    {handler}
        {wait}tx.execute({insert})
"""
SESSION = "text(\"insert into seen values ('a')\")"
PLAIN = "\"insert into seen values ('a')\""


@pytest.mark.parametrize(
    ("store", "handler", "insert"),
    [
        ("PostgresStore(engine=create_engine(ENGINE_URL))", "def write(order: bytes, tx: Session) -> None:", SESSION),
        (
            "PostgresStore(engine=create_async_engine(ENGINE_URL))",
            "async def write(order: bytes, tx: AsyncSession) -> None:",
            SESSION,
        ),
        ("URL", "async def write(order: bytes, tx: psycopg.AsyncConnection) -> None:", PLAIN),
    ],
    ids=["Session", "AsyncSession", "AsyncConnection"],
)
def test_what_the_handler_writes_is_rolled_back(
    shop: Shop, postgres_url: str, database: psycopg.Connection, store: str, handler: str, insert: str
) -> None:
    database.execute("create table seen (value text not null check (value <> 'bad'))")
    shop.broker(orders=1)
    shop.order(b"1", partition=0)
    wait = "await " if handler.startswith("async") else ""
    source = APP.format(url=postgres_url, store=store, handler=handler, insert=insert, wait=wait)
    shop.write("shop", source)
    tried = shop.run("try", "shop:app", "orders/0@0")
    assert tried.stdout.endswith("passes; its writes were rolled back\n"), tried.stdout + tried.stderr
    assert tried.returncode == 0

    shop.write("shop", source.replace("('a')", "('bad')"))
    tried = shop.run("try", "shop:app", "orders/0@0")
    assert tried.returncode == 1
    assert "CheckViolation" in tried.stdout
    assert database.execute("select count(*) from seen").fetchone() == (0,)
