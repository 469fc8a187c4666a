"""What a handler gets from the Redis store: a pipeline that only queues, and the rules for what may be queued.

This module sends nothing to Redis, except requests for the keys of a few commands that only the server can parse. A
command that would fail is refused while the handler runs, at the line that queues the command. Otherwise it would fail
in the script that applies the queue, when a part of a record is already written, and Redis cannot undo.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from redis.client import EMPTY_RESPONSE, Pipeline
from redis.connection import ConnectionPool
from redis.crc import key_slot

from kconsume.backends.redis.rows import PREFIX
from kconsume.errors import TransactionMisused

MOST_ARGUMENTS: Final = 7000
"""Limit for one command: Lua passes arguments on its stack, which holds 8,000."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Limit for one queue: a queue is sent as one argument, and Redis accepts 512 MB."""

_NOT_ALLOWED = (
    "a handler must not call {name} on the pipeline: its commands are applied together with the offset when the "
    "handler returns, and dropped when the handler raises; remove the call"
)
_NO_REPLIES = (
    "the reply of {name} cannot be read here, because the pipeline is applied after the handler has returned: read "
    "with a client of your own, from a function with @app.resource"
)
_ENDED = (
    "{name} was queued after the handler had returned, and would be lost: queue it inside the handler, and wait there "
    "for the threads that it starts"
)
_OURS: Final = PREFIX.encode()
# Redis allows these commands in scripts, but they would lose the offset: they switch to another database or empty it.
_NEVER = frozenset({b"SELECT", b"SWAPDB", b"FLUSHDB", b"FLUSHALL"})


class Command(NamedTuple):
    """What the server reports about a command.

    Attributes:
        arity: the number of its words, its name included. If negative, the command has at least that many words.
        first: the index of its first key. The keys go on to `last` (counted from the end if negative) in steps of
            `step`.
    """

    arity: int
    flags: frozenset[str]
    first: int
    last: int
    step: int


Words = Sequence[bytes]
KeysOf = Callable[[Words], Sequence[bytes] | None]
"""Asks the server for the keys of a command; None if the server cannot parse the command."""


class _PlainCommand(NamedTuple):
    """A command that may be queued if its number of words is right and none of its keys is kconsume's. Most commands
    are plain commands."""

    least: int
    most: int
    first: int
    last: int
    step: int


class Rules:
    """Decides which commands may be queued: by the server's table of commands, and on a cluster by the slot of the
    keys."""

    def __init__(self, table: Mapping[bytes, Command], ask_keys: KeysOf, slot: int | None = None) -> None:
        """
        Args:
            table: the commands of the server.
            ask_keys: asks the server for the keys of a command whose keys are not at fixed places (SORT … STORE).
            slot: the slot of the tag, on a cluster.
        """
        self.slot = slot
        self._table = table
        self._ask_keys = ask_keys
        self._plain: dict[bytes, _PlainCommand | None] = {}

    def refusal(self, words: Words, touched: dict[bytes, None]) -> str | None:
        """Return why this command cannot be applied together with an offset; None if it can be applied.

        Args:
            words: the command.
            touched: on a cluster, the keys of the command are added to this dict.
        """
        name = words[0]
        try:
            plain = self._plain[name]
        except KeyError:
            plain = self._plain[name] = self._plain_command(name.upper())
        if plain is None or not plain.least <= len(words) <= plain.most:
            return self._reason(words, touched)
        if plain.first == plain.last:
            return self._reason(words, touched) if words[plain.first].startswith(_OURS) else None
        for key in _keys(plain, words):
            if key.startswith(_OURS):
                return self._reason(words, touched)
        return None

    def _plain_command(self, name: bytes) -> _PlainCommand | None:
        """The values for the checks of a plain command; None for a command that needs all checks each time."""
        command = self._table.get(name)
        if command is None or name in _NEVER or self.slot is not None or _flagged(name, command) is not None:
            return None
        # Not plain: it has no keys, or the second word decides (XGROUP CREATE), or only the server knows the keys
        # (SORT … STORE).
        if command.first <= 0 or "movablekeys" in command.flags:
            return None
        least, most = abs(command.arity), command.arity if command.arity > 0 else MOST_ARGUMENTS
        return _PlainCommand(max(least, command.first + 1), most, command.first, command.last, command.step)

    def _reason(self, words: Words, touched: dict[bytes, None]) -> str | None:
        name = words[0].upper()
        if name in _NEVER:
            return f"{_text(name)} would remove the offset with the data: remove the command from the handler"
        command = self._table.get(name)
        if command is None:
            return f"this Redis has no command {_text(name)}: correct its name, or use a server that has it"
        command = self._table.get(name + b"|" + words[1].upper(), command) if len(words) > 1 else command
        if len(words) > MOST_ARGUMENTS:
            return (
                f"{_text(name)} has {len(words) - 1:,} arguments, and a script can pass on at most "
                f"{MOST_ARGUMENTS:,}: queue several commands with fewer arguments each"
            )
        return (
            _flagged(name, command)
            or _miscounted(name, command, words)
            or self._misplaced(name, command, words, touched)
        )

    def _misplaced(self, name: bytes, command: Command, words: Words, touched: dict[bytes, None]) -> str | None:
        keys = self._ask_keys(words) if "movablekeys" in command.flags else _keys(command, words)
        if keys is None:
            return f"Redis does not find the keys of {_text(b' '.join(words))}: correct the call"
        for key in keys:
            if key.startswith(_OURS):
                return f"{_text(name)} {_text(key)} would change what kconsume keeps there: choose another key"
            if self.slot is not None and key_slot(key) != self.slot:
                return (
                    f"{_text(name)} {_text(key)} is in slot {key_slot(key)} of the cluster and the offset in slot "
                    f"{self.slot}, so they cannot be written together: put the store's tag into the key, as in "
                    f"{{tag}}:{_text(key)}"
                )
        if self.slot is not None:
            touched.update(dict.fromkeys(keys))
        return None


class QueuedPipeline(Pipeline):
    """A `redis.client.Pipeline` that queues commands for the script that applies them with the offset.

    Every command returns the pipeline itself, as in redis-py.
    """

    def __init__(self, pool: ConnectionPool, rules: Rules) -> None:
        super().__init__(pool, {}, False, None)
        self._encoder = pool.get_encoder()
        self._is_usual = (self._encoder.encoding, self._encoder.encoding_errors) == ("utf-8", "strict")
        self._rules = rules
        # Flat lists: a list for each record would be work for the garbage collector.
        self._commands: list[bytes] = []
        self._offsets: list[int] = []
        self._starts: list[int] = [0]
        """The index in `_commands` of each record's first command; `_offsets` has the records' offsets. The first
        element is 0, for commands that are queued before the first record."""
        self._bytes = 0
        self.touched: dict[bytes, None] = {}
        """On a cluster: the keys of the queued commands, each once."""
        self.ended = False
        """True when the handler has returned. Later commands are refused."""
        self.refused: TransactionMisused | None = None
        """The error for the first refused command, kept even if the handler caught the error. Then the queue lacks a
        command, and is not applied."""

    def next_record(self, offset: int) -> None:
        """Begin a record: commands that are queued from now on belong to the record at this offset."""
        self._offsets.append(offset)
        self._starts.append(len(self._commands))

    def end(self) -> None:
        """Refuse later commands. Called when the handler has returned."""
        self.ended = True

    def packed(self, old: int, new: int) -> bytes:
        """Return the queued commands in the form that the script `APPLY` reads: for each record with commands, its
        offset, the offset at which the next record begins, and its commands.

        Args:
            old: the stored offset, at which the first record begins.
            new: the offset to store, at which the last record ends.
        """
        texts = [b"%d" % offset for offset in (old, *self._offsets, new)]
        borders = [_HEADS[len(text)] + text for text in texts]
        commands, starts = self._commands, [*self._starts, len(self._commands)]
        count, parts = 0, [b""]
        for first, end, start, stop in zip(borders, borders[1:], starts, starts[1:], strict=False):
            if start != stop:
                count += 1
                parts += (_array(2 + stop - start), first, end, *commands[start:stop])
        parts[0] = _array(count)
        return b"".join(parts)

    def execute_command(self, *args: object, **options: object) -> QueuedPipeline:
        if options and EMPTY_RESPONSE in options:  # redis-py knows the reply and sends nothing
            return self
        words: list[bytes] = []
        for arg in args:  # fast path for common types; redis-py's encoder takes the others, and refuses None and bool
            if type(arg) is bytes:
                words.append(arg)
            elif type(arg) is str and self._is_usual:
                words.append(arg.encode())
            elif type(arg) is int:
                words.append(b"%d" % arg)
            else:
                words.append(self._encoded(arg))
        if b" " in words[0]:  # as redis-py does: XGROUP CREATE is sent as two words
            words[:1] = words[0].split()
        if self.ended:
            raise TransactionMisused(_ENDED.format(name=_text(words[0])))
        refusal = self._rules.refusal(words, self.touched)
        if refusal is not None:
            self._refuse(refusal)
        parts = [_array(len(words))]
        for word in words:
            parts += (_HEADS[len(word)] if len(word) < 256 else _head(len(word)), word)
        packed = b"".join(parts)
        self._bytes += len(packed)
        if self._bytes > MOST_BYTES:
            self._refuse(
                f"more than {MOST_BYTES // 1024 // 1024} MiB were queued for one transaction: make it smaller, with "
                f"chunk= or batch= of @app.consume"
            )
        self._commands.append(packed)
        return self

    pipeline_execute_command = execute_command

    def _encoded(self, argument: object) -> bytes:
        return bytes(self._encoder.encode(argument))  # type: ignore[no-untyped-call]

    def _refuse(self, sentence: str) -> NoReturn:
        refused = TransactionMisused(sentence)
        self.refused = self.refused or refused
        raise refused

    # Methods that would end the queue or bypass it are refused.

    def execute(self, raise_on_error: bool = True) -> NoReturn:  # noqa: ARG002  (redis-py's signatures, from here on)
        self._refuse(_NOT_ALLOWED.format(name="execute()"))

    def watch(self, *names: object) -> NoReturn:  # noqa: ARG002
        self._refuse(_NOT_ALLOWED.format(name="watch()"))

    def unwatch(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="unwatch()"))

    def multi(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="multi()"))

    def discard(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="discard()"))

    def reset(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="reset()"))

    def close(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="close()"))

    def immediate_execute_command(self, *args: object, **options: object) -> NoReturn:  # noqa: ARG002
        self._refuse(_NOT_ALLOWED.format(name="immediate_execute_command()"))

    def load_scripts(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="load_scripts()"))

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> NoReturn:  # noqa: ARG002
        self._refuse(_NOT_ALLOWED.format(name="pipeline()"))

    def pubsub(self, **kwargs: object) -> NoReturn:  # noqa: ARG002
        self._refuse(_NO_REPLIES.format(name="pubsub()"))

    def monitor(self) -> NoReturn:
        self._refuse(_NO_REPLIES.format(name="monitor()"))

    def lock(self, *args: object, **kwargs: object) -> NoReturn:  # noqa: ARG002
        self._refuse(_NO_REPLIES.format(name="lock()"))

    def client(self) -> NoReturn:
        self._refuse(_NO_REPLIES.format(name="client()"))

    def __enter__(self) -> NoReturn:
        self._refuse(_NOT_ALLOWED.format(name="with"))

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> NoReturn:
        self._refuse(_NO_REPLIES.format(name="a command"))

    def __len__(self) -> int:
        return len(self._commands)

    def __del__(self) -> None: ...


def table_of(reply: Iterable[Sequence[object]]) -> dict[bytes, Command]:
    """The reply to COMMAND as a table by command name; since Redis 7 also by names such as `XGROUP|CREATE`."""
    table: dict[bytes, Command] = {}
    for entry in reply:
        name, arity, flags, first, last, step = entry[:6]
        assert isinstance(name, bytes)
        assert isinstance(arity, int)
        assert isinstance(first, int)
        assert isinstance(last, int)
        assert isinstance(step, int)
        assert isinstance(flags, list | set | frozenset)
        words = frozenset(_text(flag).lower() for flag in flags)
        table[name.upper()] = Command(arity, words, first, last, step)
        if len(entry) > 9 and isinstance(entry[9], list):
            table.update(table_of(entry[9]))
    return table


def _flagged(name: bytes, command: Command) -> str | None:
    flags = command.flags
    if "readonly" in flags:
        return _NO_REPLIES.format(name=_text(name))
    if "noscript" in flags or "admin" in flags or "blocking" in flags:
        return (
            f"{_text(name)} cannot be applied together with an offset, because Redis runs no such command inside a "
            f"script: use a client of your own, from a function with @app.resource; its effects are at least once"
        )
    return None


def _miscounted(name: bytes, command: Command, words: Words) -> str | None:
    arity, count = command.arity, len(words)
    if count == arity or (arity < 0 and count >= -arity):
        return None
    wanted = f"{arity - 1}" if arity > 0 else f"at least {-arity - 1}"
    return f"{_text(name)} takes {wanted} arguments and got {count - 1}: correct the call"


def _keys(command: Command | _PlainCommand, words: Words) -> Sequence[bytes]:
    if command.first <= 0:
        return ()
    end = command.last + 1 if command.last >= 0 else len(words) + command.last + 1
    return words[command.first : end : command.step or 1]


def _text(word: object) -> str:
    return word.decode(errors="replace")[:100] if isinstance(word, bytes) else str(word)


# MessagePack, written here, because the library in Redis 6 reads only the old raw type, which msgspec does not write.

_HEADS: Final = [bytes((0xA0 | size,)) if size < 32 else bytes((0xD9, size)) for size in range(256)]


_ARRAYS: Final = [bytes((0x90 | size,)) for size in range(16)]


def _head(size: int) -> bytes:
    """The MessagePack head of a word of 256 bytes or more."""
    return struct.pack(">BH", 0xDA, size) if size < 65536 else struct.pack(">BI", 0xDB, size)


def _array(size: int) -> bytes:
    if size < 16:
        return _ARRAYS[size]
    return struct.pack(">BH", 0xDC, size) if size < 65536 else struct.pack(">BI", 0xDD, size)
