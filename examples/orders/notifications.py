"""A letter for each reservation, by an HTTP call to another company: called at least once, but only one letter.

The call is outside of any transaction, so after a kill it is made again. `Record.id` is the same in both calls, and the
letter office recognises it. `repeats="drop"` is for events that the inventory sent twice: they have different offsets,
so their ids differ. `rate=` is the limit of the office, for each process.

    kconsume run examples.orders.notifications:app
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from kconsume import App, Rate, Record, Retry

from .events import OFFICE, RESERVATIONS, SHOP, STAGE, Released, Reserved

app = App("localhost:9092", group=f"{STAGE}notifications", offsets=SHOP)


@app.resource
async def office() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=OFFICE, timeout=10) as client:
        yield client


@app.consume(RESERVATIONS, repeats="drop", rate=Rate(60, per=1.0), retry=Retry(attempts=8), chunk=1)
async def write(event: Reserved | Released, record: Record, office: httpx.AsyncClient) -> None:
    text = "is reserved" if isinstance(event, Reserved) else "is cancelled"
    answer = await office.post(
        "/letters",
        json={"number": event.number, "text": f"Your order {event.number} {text}."},
        headers={"Idempotency-Key": record.id},
    )
    answer.raise_for_status()


if __name__ == "__main__":
    app.run()
