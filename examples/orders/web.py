"""The web service: writes an order and sends its event, both or neither, and records the answer of the inventory.

The row and the event are written in one transaction, through the outbox. So a client that got no answer can send its
request again: if the order exists, no second event is sent. Everything runs on the event loop of the web server. The
service answers requests after its consumer has claimed its partitions, and ends if its consumer fails.

    uvicorn examples.orders.web:web
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
from fastapi import FastAPI, HTTPException
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, PositiveInt

from kconsume import App
from kconsume.backends import Outbox

from .events import ORDERS, RESERVATIONS, SHOP, STAGE, Cancelled, Placed, Released, Reserved

app = App("localhost:9092", group=f"{STAGE}orders", offsets=SHOP)
pool = AsyncConnectionPool(SHOP, min_size=1, max_size=8, open=False)
outbox = Outbox(SHOP)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    try:
        async with pool, app.running():
            yield
    finally:
        outbox.close()


web = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    sku: str
    quantity: PositiveInt


@web.put("/orders/{number}")
async def place(number: int, order: Order) -> dict[str, int]:
    async with pool.connection() as tx:
        placed = await tx.execute(
            "insert into orders (number, sku, quantity) values (%s, %s, %s) on conflict do nothing",
            (number, order.sku, order.quantity),
        )
        if placed.rowcount:  # otherwise the order exists, and its event was sent
            await outbox.asend(tx, ORDERS, Placed(number, order.sku, order.quantity), key=order.sku)
    return {"number": number}


@web.delete("/orders/{number}")
async def cancel(number: int) -> dict[str, int]:
    async with pool.connection() as tx:
        found = await tx.execute("select sku, cancelled from orders where number = %s for update", (number,))
        order = await found.fetchone()
        if order is None:
            raise HTTPException(404, f"there is no order {number}")
        sku, cancelled = order
        if not cancelled:
            await tx.execute("update orders set cancelled = true where number = %s", (number,))
            await outbox.asend(tx, ORDERS, Cancelled(number), key=sku)
    return {"number": number}


@web.get("/orders/{number}")
async def look(number: int) -> dict[str, object]:
    async with pool.connection() as tx:
        found = await tx.execute("select sku, quantity, cancelled, state from orders where number = %s", (number,))
        order = await found.fetchone()
    if order is None:
        raise HTTPException(404, f"there is no order {number}")
    return dict(zip(("sku", "quantity", "cancelled", "state"), order, strict=True))


@app.consume(RESERVATIONS, repeats="drop")
async def note(event: Reserved | Released, tx: psycopg.AsyncConnection) -> None:
    state = "reserved" if isinstance(event, Reserved) else "released"
    await tx.execute("update orders set state = %s, answers = answers + 1 where number = %s", (state, event.number))
