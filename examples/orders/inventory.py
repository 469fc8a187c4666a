"""Reserves stock. The reservation, the line in the ledger, the resulting event and the offset commit together.

Events of one article have the article as key. So they are in one partition, and no two handlers write the same row in
`stock`. A user who counts the stock locks that row for a moment; then the record is tried again. An order for an
unknown article would fail again, so it becomes a dead letter at once, in the same transaction as the offset.

    kconsume run examples.orders.inventory:app
"""

from __future__ import annotations

import psycopg

from kconsume import App, DeadLetter, Outgoing, Record, Retry

from .events import ORDERS, RESERVATIONS, SHOP, STAGE, Cancelled, Placed, Released, Reserved

app = App("localhost:9092", group=f"{STAGE}inventory", offsets=SHOP)


class NoSuchArticle(Exception):
    """The article is not in the catalogue."""


class NotReserved(Exception):
    """A cancelled order has no reservation."""


@app.consume(
    ORDERS,
    to=RESERVATIONS,
    repeats="drop",  # if the web service is killed before it deletes a sent outbox row, the event comes twice
    retry=Retry(attempts=8, give_up_on=(NoSuchArticle, NotReserved)),
    on_error=DeadLetter(table="unfilled"),
)
def keep_stock(event: Placed | Cancelled, record: Record, tx: psycopg.Connection) -> Outgoing:
    if isinstance(event, Placed):
        reserve(event.number, event.sku, event.quantity, record.attempt, tx)
        return Outgoing(Reserved(event.number), key=event.sku)
    taken = tx.execute("select sku, quantity from ledger where number = %s", (event.number,)).fetchone()
    if taken is None:
        raise NotReserved(f"order {event.number} is cancelled, but has no reservation")
    sku, quantity = taken
    reserve(event.number, sku, -quantity, record.attempt, tx)
    return Outgoing(Released(event.number), key=sku)


def reserve(number: int, sku: str, quantity: int, attempt: int, tx: psycopg.Connection) -> None:
    if tx.execute("select 1 from stock where sku = %s for update nowait", (sku,)).fetchone() is None:
        raise NoSuchArticle(f"{sku} is not in the catalogue")
    tx.execute("update stock set reserved = reserved + %s where sku = %s", (quantity, sku))
    tx.execute("insert into ledger values (%s, %s, %s, %s)", (number, sku, quantity, attempt))


if __name__ == "__main__":
    app.run()
