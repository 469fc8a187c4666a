"""What no checker may let pass. Never run, only checked, with the comments that silence them taken away.

Each line that ends in such a comment is a control: were a type wider than it says, the line would pass.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator

from kconsume import App, Batching, Outgoing, Rate, Record, Router, Sender
from kconsume.testing import Fed, afeed, feed, override

app = App("localhost:9092", group="shop")


@app.consume("orders", to="reserved")
def reserve(order: bytes, tx: sqlite3.Connection, *, loud: bool = False) -> str:
    return str(order)


@app.consume("shipments", to="shipped")
async def ship(order: bytes) -> str:
    return str(order)


@app.resource
def client() -> Iterator[sqlite3.Connection]:
    yield sqlite3.connect(":memory:")


@app.resource
async def session() -> AsyncIterator[sqlite3.Connection]:
    yield sqlite3.connect(":memory:")


@app.wrap
def around(record: Record) -> Iterator[None]:
    yield


# A decorated function takes and gives what it did before.


def misused(tx: sqlite3.Connection) -> None:
    reserve("text", tx)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    reserve(b"")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    reserve(b"", tx, quiet=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    reserve(b"", tx).missing  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    ship(b"").upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    client().cursor()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    next(session())  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    around()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def misawaited() -> None:
    (await ship(b"")).missing  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    await reserve(b"", app)  # type: ignore[misc, arg-type]  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]


# What the decorators take

app.consume(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", on_error="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", executor="fork")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", start="middle")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", batch=500)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", rate=50)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", offsets=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
app.consume("x", retries=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
app.consume("x")(5)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.resource(5)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.wrap("x")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
app.include(app)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Router("x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
App("x", group="g", offsets=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
App("x", group="g", kafka={"a": object()})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]


# Values

Rate("50")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Batching(records="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Outgoing(b"", key=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Outgoing(b"", headers={"trace": 1})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
Outgoing(b"").topic.upper()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
Record().key.decode()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


def sends(sender: Sender) -> None:
    sender.send(b"value")  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    sender.send(None, b"value")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# Running

with app.running() as running:
    running.missing  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
app.catch_up().missing  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


async def on_a_loop() -> None:
    async with app.running() as running:
        running.missing  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


# The testing kit

feed(app, "orders")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
feed(app, "orders", b"", key=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
feed(app, "orders", b"", headers="x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
feed(app, "orders", b"", resources=[client])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
feed("shop:app", "orders", b"")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
feed(app, "orders", b"").sent.value  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
Fed("handled").outcome = "failed"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
Fed("done")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
afeed(app, "orders", b"").outcome  # type: ignore[attr-defined]  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
override(app, brokers=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
override(app, shutdown=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
