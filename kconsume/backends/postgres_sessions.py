"""The sessions that handlers get: SQLAlchemy's own, on which only kconsume begins and ends the transaction."""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from kconsume.errors import TransactionMisused

NOT_YOURS = (
    "a handler must not call {call} on its session, because kconsume commits its writes and the offset together when "
    "it returns: remove the call, or use `session.begin_nested()` for a part that may be undone"
)
_OVER = (
    "this session has ended, for a handler has it until it returns: do not keep it, and use one of your own for later"
)


class LentSession(Session):
    """What a plain function gets: a session on which only kconsume begins and ends the transaction."""

    def __init__(self, bind: Connection | None = None, **settings: Any) -> None:
        super().__init__(bind, **{"expire_on_commit": False, "close_resets_only": False, **settings})
        self.refused: str | None = None
        """What the handler tried, whether or not it let the refusal out."""
        self.over = False

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
        raise TransactionMisused(NOT_YOURS.format(call=call))


class LentAsyncSession(AsyncSession):
    """What an `async def` gets: its calls are those of a `LentSession`."""

    def __init__(self, bind: AsyncConnection) -> None:
        super().__init__(bind, sync_session_class=LentSession)

    @property
    def lent(self) -> LentSession:
        assert isinstance(self.sync_session, LentSession)
        return self.sync_session

    async def __aenter__(self) -> NoReturn:
        self.lent.refuse("`async with session:`")
