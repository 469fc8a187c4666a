"""The sessions that handlers get: SQLAlchemy's own, on which only kconsume begins and ends the transaction."""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from kconsume.errors import TransactionMisused

NOT_ALLOWED = (
    "a handler must not call {call} on its session, because kconsume commits the handler's writes and the offset "
    "together when the handler returns: remove the call, or use `session.begin_nested()` for a part that may be rolled "
    "back"
)
_OVER = (
    "this session has ended, because a handler may use it only until the handler returns: do not keep it, and use a "
    "session of your own for later work"
)


class HandlerSession(Session):
    """The session that a plain function gets."""

    def __init__(self, bind: Connection | None = None, **settings: Any) -> None:
        super().__init__(bind, **{"expire_on_commit": False, "close_resets_only": False, **settings})
        self.refused: str | None = None
        """The forbidden call that the handler made, even if the handler caught the error; None if there was none."""
        self.over = False
        """True once the transaction has ended."""

    def __enter__(self) -> NoReturn:
        self.refuse("`with session:`")

    def begin(self, nested: bool = False) -> SessionTransaction:
        return super().begin(nested=True) if nested else self.refuse("begin()")

    def commit(self) -> None:
        self.refuse("commit()")

    def rollback(self) -> None:
        self.refuse("rollback()")

    def prepare(self) -> None:
        self.refuse("prepare()")

    def close(self) -> None:
        self.refuse("close()")

    def reset(self) -> None:
        self.refuse("reset()")

    def invalidate(self) -> None:
        self.refuse("invalidate()")

    def refuse(self, call: str) -> NoReturn:
        if self.over:
            raise TransactionMisused(_OVER)
        self.refused = call
        raise TransactionMisused(NOT_ALLOWED.format(call=call))


class AsyncHandlerSession(AsyncSession):
    """The session that an `async def` gets. It forwards its calls to a `HandlerSession`."""

    def __init__(self, bind: AsyncConnection) -> None:
        super().__init__(bind, sync_session_class=HandlerSession)

    @property
    def handler_session(self) -> HandlerSession:
        assert isinstance(self.sync_session, HandlerSession)
        return self.sync_session

    async def __aenter__(self) -> NoReturn:
        self.handler_session.refuse("`async with session:`")
