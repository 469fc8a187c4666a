"""The letter office, a service of another company. It writes one letter for each idempotency key, and is never killed.

Its table `letters` is in the shop's database, so that the checker can read it. For some letters the
office refuses the first request with status 503.

    uvicorn examples.orders.office:web
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel

from .demand import is_busy_for
from .events import SHOP

pool = AsyncConnectionPool(SHOP, min_size=1, max_size=4, open=False)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with pool:
        yield


web = FastAPI(lifespan=lifespan)


class Letter(BaseModel):
    number: int
    text: str


@web.post("/letters")
async def write(letter: Letter, idempotency_key: Annotated[str, Header()]) -> dict[str, str]:
    async with pool.connection() as tx:
        asked = await tx.execute(
            "insert into letters (key, number, text) values (%s, %s, %s)"
            " on conflict (key) do update set asked = letters.asked + 1 returning asked",
            (idempotency_key, letter.number, letter.text),
        )
        row = await asked.fetchone()
    if row == (1,) and is_busy_for(letter.number):
        raise HTTPException(503, "busy, ask again")
    return {"key": idempotency_key}
