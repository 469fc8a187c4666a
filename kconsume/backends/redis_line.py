"""The line to a Redis: sends one command or script and waits for its answer, with a deadline, and never sends it twice.

redis-py's own commands are not used for that, because they try again by themselves after a timeout: a script that had
been applied would find itself applied, and take that for the work of another. On a cluster the line goes to the node
that keeps the tag's slot, and back to the address that it was given when that node is gone. Here also: what a server's
errors mean. Knows nothing of offsets.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from redis import exceptions
from redis.connection import ConnectionPool

from kconsume.backends.redis_address import Place
from kconsume.backends.redis_pipeline import Rules, Words
from kconsume.backends.redis_script import Script
from kconsume.backends.redis_server import RIGHTS, Argument, Facts, Reply, examined, facts_of
from kconsume.errors import ConfigurationError, KconsumeError, StoreError, StoreUnavailable

_T = TypeVar("_T")

# Errors that may pass. Inside the text too: Redis 6 wraps an error of a script's first write in one of its own.
_PASSING = re.compile(r"\b(OOM|READONLY|MISCONF|LOADING|BUSY|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|MASTERDOWN|UNKILLABLE)\b")
_PASSING_KINDS = (
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.ConnectionError,
    exceptions.TimeoutError,
)
# Of a command inside a script, in the words of Redis 6 and 7.
_FORBIDDEN = re.compile(r"\bNOPERM\b|The user executing the script can't|ACL failure in script")
# After which the node that we went to is not asked again before the one that we were told of.
_ASTRAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.MovedError, KconsumeError)

_COPIED = 1024 * 1024


class Line:
    """One Redis, from any thread. Connects when it is first used."""

    def __init__(self, place: Place) -> None:
        self.address = place.address
        self.tag = place.tag
        self._place = place
        self._home = self._node = _Node(place.pool)
        self._lock = threading.Lock()

    @property
    def pool(self) -> ConnectionPool:
        return self._node.pool

    @property
    def rules(self) -> Rules:
        """What may be queued; the first use of the server, which is refused if it cannot keep offsets."""
        return self._rules_of(self._node)

    def run(self, script: Script, keys: Sequence[str | bytes], *arguments: Argument) -> Reply:
        """Run a script, which was begun at most once when this returns or raises. `StoreUnavailable` means that what
        came of it is not known."""
        _ = self.rules
        try:
            return self._ask("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except exceptions.NoScriptError:  # so it was not begun
            return self._told(lambda: self._ask("EVAL", script.text, len(keys), *keys, *arguments))
        except exceptions.RedisError as error:
            raise self._translated(error) from error

    def call(self, *words: Argument) -> Reply:
        """Run one command."""
        _ = self.rules
        return self._told(lambda: self._ask(*words))

    def facts(self) -> Facts:
        """What the server says of itself, also one that would be refused."""
        return self._told(lambda: facts_of(self._ask))

    def close(self) -> None:
        """Let go of our own connections; a client that was given is its owner's to close."""
        if self._place.elsewhere is not None:
            for node in {self._home, self._node}:
                node.pool.disconnect()

    # One exchange

    def _told(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except exceptions.RedisError as error:
            raise self._translated(error) from error

    def _ask(self, *words: Argument) -> Reply:
        node = self._node
        try:
            try:
                return _exchange(node.pool, *words)
            except exceptions.MovedError as moved:  # it was not run: the tag's slot is on another node, or moved there
                if self._place.elsewhere is None:
                    raise
                node = self._followed(node, moved)
                _ = self._rules_of(node)
                return _exchange(node.pool, *words)
        except _ASTRAY:
            self._turn_back(node)
            raise

    def _keys_of(self, words: Words) -> Sequence[bytes] | None:
        """The server's own word on where the keys of a command are; None if it cannot make sense of the command."""
        try:
            return cast("Sequence[bytes]", self._ask("COMMAND", "GETKEYS", *words))
        except exceptions.RedisError as error:
            if "no key arguments" in str(error):
                return ()
            if str(error).startswith("Invalid"):
                return None
            raise self._translated(error) from error

    # Which node

    def _rules_of(self, node: _Node) -> Rules:
        if node.rules is None:
            with node.lock:
                if node.rules is None:
                    ask = partial(_exchange, node.pool)
                    node.rules = self._told(lambda: examined(ask, self.address, self.tag, self._keys_of))
        return node.rules

    def _followed(self, node: _Node, moved: exceptions.MovedError) -> _Node:
        assert self._place.elsewhere is not None
        host = cast(str, moved.host) or node.pool.connection_kwargs["host"]
        with self._lock:
            if self._node is node:  # else another thread was told the same before us
                self._node = _Node(self._place.elsewhere(host, moved.port))
                node.pool.disconnect(inuse_connections=False)
            return self._node

    def _turn_back(self, node: _Node) -> None:
        """The node may be gone for good, and the slot be somebody else's; who that is, the first one knows."""
        if node is self._home:
            return
        with self._lock:
            if self._node is node:
                self._node = self._home
        node.pool.disconnect(inuse_connections=False)

    # What its errors mean

    def _translated(self, error: exceptions.RedisError) -> KconsumeError:
        if isinstance(error, exceptions.AuthenticationError):
            return ConfigurationError(
                f"{self.address} refused the credentials ({error}): check user and password, as in "
                f"redis://user:password@host:6379/0"
            )
        if isinstance(error, exceptions.NoPermissionError) or _FORBIDDEN.search(str(error)):
            return ConfigurationError(
                f"{self.address} does not allow its user what kconsume needs ({error}): grant what handlers queue, on "
                f"its keys, and for the offsets, with ACL SETUSER name ~kconsume:* {RIGHTS}"
            )
        if "Invalid Database" in str(error) or "DB index" in str(error):
            return ConfigurationError(f"{self.address} has no database of that number: correct the address")
        if isinstance(error, exceptions.MovedError) and self._place.elsewhere is None:
            return ConfigurationError(
                f"{self.address} is not the node that keeps this tag ({error}): give the store an address instead of a "
                f"client, and it follows"
            )
        if isinstance(error, exceptions.AskError):
            return StoreUnavailable(f"{self.address} did not do it: the tag's slot is being moved ({error})")
        if isinstance(error, _PASSING_KINDS) or _PASSING.search(str(error)):
            return StoreUnavailable(
                f"{self.address} did not do it: {str(error) or type(error).__name__}; is the server well?"
            )
        return StoreError(f"{self.address} refused what kconsume asked: {error}; is kconsume:* used by something else?")


class _Node:
    """A server that is spoken to, and what it was found to be."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.rules: Rules | None = None


def _at_once(pieces: Sequence[bytes]) -> Sequence[bytes]:
    """redis-py sends a long argument by itself, between what comes before and behind it: three times out of the
    interpreter and back, and while others compute the way back is a wait. Longer ones are not worth a copy."""
    return [b"".join(pieces)] if sum(map(len, pieces)) < _COPIED else pieces


def _exchange(pool: ConnectionPool, *words: Argument) -> Reply:
    # In UTF-8, whatever a person's own client makes of text.
    packed = [word.encode() if isinstance(word, str) else word for word in words]
    connection = pool.get_connection()
    try:
        connection.send_packed_command(_at_once(connection.pack_command(*packed)))  # type: ignore[no-untyped-call]
        return cast(Reply, connection.read_response(disable_decoding=True))
    except exceptions.ResponseError as error:
        if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error):
            # A primary no more: by its name the new one is found, and by this connection never.
            connection.disconnect()  # type: ignore[no-untyped-call]
        raise  # an answer, read to its end
    except BaseException:
        # Else the next question would get this one's answer.
        connection.disconnect()  # type: ignore[no-untyped-call]
        raise
    finally:
        pool.release(connection)
