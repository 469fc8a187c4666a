"""Orders one letter for each reservation, by an HTTP call. The call may be repeated; the letter is not.

The call is outside of any transaction, so after a kill the call is made again. `Record.id` is the same in both calls,
so the letter office recognises the repeat. `repeats="drop"` is for an event that the inventory has sent twice: the two
records have different offsets, and so different ids. `rate=` is the office's limit for each process.

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
