"""The connection to a Redis: sends one command or script, waits for its reply with a deadline, and never sends it
twice.

redis-py's own commands are not used, because they retry after a timeout: a script that was already applied would then
find the row changed, and report that another owner changed the row. On a cluster the connection goes to the node that
holds the slot of the tag, and back to the given address when that node is gone. This module also translates the errors
of the server.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from redis import exceptions
from redis.connection import ConnectionPool

from kconsume.backends.redis.address import RedisAddress
from kconsume.backends.redis.pipeline import Rules, Words
from kconsume.backends.redis.scripts import Script
from kconsume.backends.redis.server_checks import RIGHTS, Argument, RedisServerFacts, Reply, examined, facts_of
from kconsume.errors import ConfigurationError, KconsumeError, StoreError, StoreUnavailable

_T = TypeVar("_T")

# The codes of temporary errors. A code may be anywhere in the text, because Redis 6 wraps the error of a script's first
# write in another error.
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
# The errors of Redis 6 and of Redis 7 for a forbidden command inside a script.
_FORBIDDEN = re.compile(r"\bNOPERM\b|The user executing the script can't|ACL failure in script")
# After one of these errors the next command goes to the given address again, not to the node of the last redirection.
_LEAVE_NODE = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.MovedError, KconsumeError)

_COPIED = 1024 * 1024


class RedisConnection:
    """One Redis, used from any thread. Connects at the first use.

    `_lock` guards `_node`; any thread may read it without the lock.
    """

    def __init__(self, address: RedisAddress) -> None:
        self.address = address.address
        self.tag = address.tag
        self._pool_at = address.pool_at
        self._given = self._node = _Node(address.pool)
        self._lock = threading.Lock()

    @property
    def pool(self) -> ConnectionPool:
        return self._node.pool

    @property
    def rules(self) -> Rules:
        """The rules for the commands that handlers may queue. The first use checks the server, and raises
        `ConfigurationError` if the server cannot keep offsets."""
        return self._rules_of(self._node)

    def run(self, script: Script, keys: Sequence[str | bytes], *arguments: Argument) -> Reply:
        """Run a script at most once, also if this method raises. After `StoreUnavailable` the outcome is unknown."""
        _ = self.rules
        try:
            return self._ask("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except exceptions.NoScriptError:  # the script was not started
            return self._with_store_errors(lambda: self._ask("EVAL", script.text, len(keys), *keys, *arguments))
        except exceptions.RedisError as error:
            raise self._translated(error) from error

    def call(self, *words: Argument) -> Reply:
        _ = self.rules
        return self._with_store_errors(lambda: self._ask(*words))

    def facts(self) -> RedisServerFacts:
        """What the server reports about itself. Works also for a server that the store would refuse."""
        return self._with_store_errors(lambda: facts_of(self._ask))

    def close(self) -> None:
        """Close the connections, unless the user gave a client, which the user closes."""
        if self._pool_at is not None:
            for node in {self._given, self._node}:
                node.pool.disconnect()

    # One exchange

    def _with_store_errors(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except exceptions.RedisError as error:
            raise self._translated(error) from error

    def _ask(self, *words: Argument) -> Reply:
        node = self._node
        try:
            try:
                return _exchange(node.pool, *words)
            except exceptions.MovedError as moved:  # the command was not run: the slot of the tag is on another node
                if self._pool_at is None:
                    raise
                node = self._redirected(node, moved)
                _ = self._rules_of(node)
                return _exchange(node.pool, *words)
        except _LEAVE_NODE:
            self._back_to_given(node)
            raise

    def _keys_of(self, words: Words) -> Sequence[bytes] | None:
        """The keys of a command, as the server reports them; None if the server cannot parse the command."""
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
                    node.rules = self._with_store_errors(lambda: examined(ask, self.address, self.tag, self._keys_of))
        return node.rules

    def _redirected(self, node: _Node, moved: exceptions.MovedError) -> _Node:
        assert self._pool_at is not None
        host = cast(str, moved.host) or node.pool.connection_kwargs["host"]
        with self._lock:
            if self._node is node:  # else another thread was redirected before us
                self._node = _Node(self._pool_at(host, moved.port))
                node.pool.disconnect(inuse_connections=False)
            return self._node

    def _back_to_given(self, node: _Node) -> None:
        """Use the given address again. The node may be gone for good, and the given address knows which node holds the
        slot now."""
        if node is self._given:
            return
        with self._lock:
            if self._node is node:
                self._node = self._given
        node.pool.disconnect(inuse_connections=False)

    # Errors of the server

    def _translated(self, error: exceptions.RedisError) -> KconsumeError:
        if isinstance(error, exceptions.AuthenticationError):
            return ConfigurationError(
                f"{self.address} refused the credentials ({error}): check user and password, as in "
                f"redis://user:password@host:6379/0"
            )
        if isinstance(error, exceptions.NoPermissionError) or _FORBIDDEN.search(str(error)):
            return ConfigurationError(
                f"{self.address} does not allow its user a command that kconsume needs ({error}): grant the commands "
                f"that handlers queue, on their keys, and for the offsets, with ACL SETUSER name ~kconsume:* {RIGHTS}"
            )
        if "Invalid Database" in str(error) or "DB index" in str(error):
            return ConfigurationError(f"{self.address} has no database of that number: correct it in the address")
        if isinstance(error, exceptions.MovedError) and self._pool_at is None:
            return ConfigurationError(
                f"{self.address} is not the node that holds this tag ({error}): give the store an address instead of a "
                f"client, so that it can follow the redirection"
            )
        if isinstance(error, exceptions.AskError):
            return StoreUnavailable(
                f"{self.address} did not run the command, because the slot of the tag is being moved ({error}): wait "
                f"until the slot is moved"
            )
        if isinstance(error, _PASSING_KINDS) or _PASSING.search(str(error)):
            return StoreUnavailable(
                f"{self.address} did not run the command ({str(error) or type(error).__name__}): check the server"
            )
        return StoreError(
            f"{self.address} refused a command of kconsume ({error}): are the keys kconsume:* used by something else?"
        )


class _Node:
    """A server, its connections, and its rules, which are read at the first use.

    `lock` guards the check that sets `rules`. Any thread reads `rules` without the lock.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.rules: Rules | None = None


def _joined(pieces: Sequence[bytes]) -> Sequence[bytes]:
    """Join the parts of a command, so that they are sent at once. redis-py sends a long argument separately from the
    parts before and after it. Each send releases the interpreter lock, and the thread must wait for the lock while
    other threads compute. Very long arguments are not joined, because the copy would cost more."""
    return [b"".join(pieces)] if sum(map(len, pieces)) < _COPIED else pieces


def _exchange(pool: ConnectionPool, *words: Argument) -> Reply:
    # Always UTF-8, whatever encoding the user's own client has.
    packed = [word.encode() if isinstance(word, str) else word for word in words]
    connection = pool.get_connection()
    try:
        connection.send_packed_command(_joined(connection.pack_command(*packed)))  # type: ignore[no-untyped-call]
        return cast(Reply, connection.read_response(disable_decoding=True))
    except exceptions.ResponseError as error:
        if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error):
            # The server is not the primary any more. A new connection to the same host name may reach the new primary.
            connection.disconnect()  # type: ignore[no-untyped-call]
        raise  # a complete reply: the connection stays usable
    except BaseException:
        # Otherwise the next command on this connection would read the reply to this command.
        connection.disconnect()  # type: ignore[no-untyped-call]
        raise
    finally:
        pool.release(connection)
