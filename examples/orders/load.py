"""The load generator: places orders and cancels some, until every request has been answered.

A request without an answer is sent again, because the web service may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import httpx

from . import demand

_AT_ONCE = 8
_AGAIN_AFTER = 0.1


class Load:
    """Places all orders. `placed` is the number of placed orders that the web service has confirmed."""

    def __init__(self, web: str, orders: int, within: float) -> None:
        self.placed = 0
        self.stopped = False
        """Set by another thread to end the load early."""
        self._web = web
        self._orders = orders
        self._within = within

    def run(self) -> None:
        """Place the orders. Blocks, so it runs in its own thread."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        numbers = iter(demand.numbers(self._orders))
        async with asyncio.timeout(self._within), httpx.AsyncClient(base_url=self._web, timeout=5) as client:
            async with asyncio.TaskGroup() as clients:
                for _ in range(_AT_ONCE):
                    clients.create_task(self._clicks(client, numbers))

    async def _clicks(self, client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            if self.stopped:
                return
            order = demand.order(number)
            await self._ask(client, "PUT", number, {"sku": order.sku, "quantity": order.quantity})
            if order.sku != demand.UNKNOWN and demand.is_cancelled(number):
                await self._ask(client, "DELETE", number, None)
            self.placed += 1

    async def _ask(self, client: httpx.AsyncClient, method: str, number: int, body: object) -> None:
        while not self.stopped:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.request(method, f"/orders/{number}", json=body)
                if answer.status_code < 500:
                    answer.raise_for_status()
                    return
            await asyncio.sleep(_AGAIN_AFTER)
