"""What a handler may queue for Redis, what it may not, and under which names offsets are kept: no server is asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.client import Pipeline
from redis.crc import key_slot

from kconsume.backends import RedisStore
from kconsume.backends.redis.pipeline import MOST_ARGUMENTS, QueuedPipeline, Rules, table_of
from kconsume.backends.redis.rows import Names, member_of, partition_of
from kconsume.backends.redis.transaction import RedisTx
from kconsume.errors import StoreError, StoreUnavailable, TransactionMisused
from kconsume.records import Partition

TABLE = table_of(
    [
        [b"get", 2, [b"readonly", b"fast"], 1, 1, 1],
        [b"exists", -2, [b"readonly", b"fast"], 1, -1, 1],
        [b"scan", -2, [b"readonly"], 0, 0, 0],
        [b"smembers", 2, [b"readonly"], 1, 1, 1],
        [b"set", -3, [b"write", b"denyoom"], 1, 1, 1],
        [b"mset", -3, [b"write", b"denyoom"], 1, -1, 2],
        [b"incrby", 3, [b"write", b"denyoom"], 1, 1, 1],
        [b"rpush", -3, [b"write", b"denyoom"], 1, 1, 1],
        [b"blpop", -3, [b"write", b"noscript"], 1, -2, 1],
        [b"eval", -3, [b"noscript", b"movablekeys"], 0, 0, 0],
        [b"evalsha", -3, [b"noscript", b"movablekeys"], 0, 0, 0],
        [b"script", -2, [b"noscript"], 0, 0, 0],
        [b"config", -2, [b"admin", b"noscript"], 0, 0, 0],
        [b"subscribe", -2, [b"pubsub", b"noscript"], 0, 0, 0],
        [b"sort", -2, [b"write", b"denyoom", b"movablekeys"], 1, 1, 1],
        [b"publish", 3, [b"pubsub", b"fast"], 0, 0, 0],
        [b"select", 2, [b"fast"], 0, 0, 0],
        [b"flushdb", -1, [b"write"], 0, 0, 0],
        [b"xgroup", -2, set(), 0, 0, 0, [], [], [], [
            [b"xgroup|create", -5, {b"write", b"denyoom"}, 2, 2, 1],
            [b"xgroup|help", 2, {b"readonly"}, 0, 0, 0],
        ]],
    ]
)  # fmt: skip


def asked_for_nothing(words: Sequence[bytes]) -> NoReturn:
    pytest.fail(f"the server was asked where the keys of {words} are")


def queue(rules: Rules | None = None) -> QueuedPipeline:
    return QueuedPipeline(redis.ConnectionPool(port=1), rules or Rules(TABLE, asked_for_nothing))


@pytest.fixture
def pipeline() -> QueuedPipeline:
    return queue()


Use = Callable[[Any], object]

ENDS: dict[str, Use] = {
    "execute": lambda p: p.execute(),
    "watch": lambda p: p.watch("a"),
    "unwatch": lambda p: p.unwatch(),
    "multi": lambda p: p.multi(),
    "discard": lambda p: p.discard(),
    "reset": lambda p: p.reset(),
    "close": lambda p: p.close(),
    "immediate_execute_command": lambda p: p.immediate_execute_command("SET", "a", 1),
    "load_scripts": lambda p: p.load_scripts(),
    "pipeline": lambda p: p.pipeline(),
    "with": lambda p: p.__enter__(),
}
READS: dict[str, Use] = {
    "get": lambda p: p.get("a"),
    "index": lambda p: p["a"],
    "in": lambda p: "a" in p,
    "for": lambda p: list(p.set("a", 1)),
    "smembers": lambda p: p.smembers("a"),
    "scan_iter": lambda p: list(p.scan_iter()),
    "pubsub": lambda p: p.pubsub(),
    "monitor": lambda p: p.monitor(),
    "lock": lambda p: p.lock("a"),
    "client": lambda p: p.client(),
}
OUTSIDE: dict[str, Use] = {
    "blpop": lambda p: p.blpop(["a"]),
    "eval": lambda p: p.eval("return 1", 0),
    "registered script": lambda p: p.register_script("return 1")(client=p),
    "script load": lambda p: p.script_load("return 1"),
    "config set": lambda p: p.config_set("maxmemory", 1),
    "subscribe": lambda p: p.execute_command("SUBSCRIBE", "a"),
}


class TestRefusals:
    @pytest.mark.parametrize("use", ENDS.values(), ids=ENDS.keys())
    def test_the_queue_is_not_the_handler_s_to_end(self, pipeline: QueuedPipeline, use: Use) -> None:
        with pytest.raises(TransactionMisused, match="remove the call"):
            use(pipeline)
        assert pipeline.refused is not None

    @pytest.mark.parametrize("use", READS.values(), ids=READS.keys())
    def test_a_reply_cannot_be_read_and_says_where_it_can(self, pipeline: QueuedPipeline, use: Use) -> None:
        with pytest.raises(TransactionMisused, match=r"a client of your own, from a function with @app\.resource"):
            use(pipeline)

    @pytest.mark.parametrize("use", OUTSIDE.values(), ids=OUTSIDE.keys())
    def test_what_redis_runs_in_no_script_is_refused(self, pipeline: QueuedPipeline, use: Use) -> None:
        with pytest.raises(TransactionMisused, match="inside a script"):
            use(pipeline)

    @pytest.mark.parametrize("words", [("SELECT", 1), ("FLUSHDB",), ("flushall",), ("SWAPDB", 0, 1)])
    def test_what_would_take_the_offset_away_is_refused(self, words: tuple[object, ...]) -> None:
        """Whatever the server's table says of it."""
        with pytest.raises(TransactionMisused, match="remove the offset"):
            queue(Rules({}, asked_for_nothing)).execute_command(*words)

    def test_a_command_that_the_server_does_not_have_is_refused(self, pipeline: QueuedPipeline) -> None:
        with pytest.raises(TransactionMisused, match="no command RPUHS: correct its name"):
            pipeline.execute_command("RPUHS", "a", 1)

    def test_a_wrong_number_of_arguments_is_refused(self, pipeline: QueuedPipeline) -> None:
        with pytest.raises(TransactionMisused, match="INCRBY takes 2 arguments and got 1"):
            pipeline.execute_command("INCRBY", "a")
        with pytest.raises(TransactionMisused, match="RPUSH takes at least 2 arguments and got 1"):
            pipeline.execute_command("RPUSH", "a")

    def test_more_arguments_than_lua_can_hand_over_are_refused(self, pipeline: QueuedPipeline) -> None:
        with pytest.raises(TransactionMisused, match="queue several commands"):
            pipeline.rpush("a", *range(MOST_ARGUMENTS))

    @pytest.mark.parametrize("words", [("SET", "kconsume:groups", 1), ("MSET", "a", 1, b"kconsume:meta", 2)])
    def test_our_own_keys_are_left_alone(self, pipeline: QueuedPipeline, words: tuple[object, ...]) -> None:
        with pytest.raises(TransactionMisused, match="what kconsume keeps there"):
            pipeline.execute_command(*words)

    def test_where_only_the_server_knows_the_keys_it_is_asked_for_them_also_without_a_cluster(self) -> None:
        """SORT … STORE writes to a key that stands anywhere in the command: it would have replaced the offset's row."""
        asked: list[Sequence[bytes]] = []

        def keys_of(words: Sequence[bytes]) -> Sequence[bytes] | None:
            asked.append(words)
            return None if words[-1] == b"STORE" else [words[1], words[-1]]

        pipeline = queue(Rules(TABLE, keys_of))
        pipeline.sort("a", store="b")
        with pytest.raises(TransactionMisused, match="what kconsume keeps there"):
            pipeline.sort("a", store="kconsume:meta")
        with pytest.raises(TransactionMisused, match="does not find the keys of SORT a STORE: correct the call"):
            pipeline.execute_command("SORT", "a", "STORE")
        assert len(asked) == 3

    def test_a_command_that_is_shorter_than_the_place_of_its_key_is_refused_in_our_words(self) -> None:
        """As Redis 6 has it in its table: the key of XGROUP is its second argument, and XGROUP HELP has one."""
        table = table_of([[b"xgroup", -2, [b"write", b"denyoom"], 2, 2, 1]])
        pipeline = queue(Rules(table, asked_for_nothing))
        pipeline.execute_command("XGROUP", "HELP")
        with pytest.raises(TransactionMisused, match="at least 1 arguments and got 0"):
            pipeline.execute_command("XGROUP")

    def test_on_a_cluster_every_key_is_in_the_slot_of_the_tag(self) -> None:
        pipeline = queue(Rules(TABLE, asked_for_nothing, key_slot(b"shop")))
        pipeline.mset({"{shop}:a": 1, "{shop}:b": 2})
        assert list(pipeline.touched) == [b"{shop}:a", b"{shop}:b"]
        with pytest.raises(TransactionMisused, match=r"put the store's tag into the key, as in \{tag\}:b"):
            pipeline.mset({"{shop}:a": 1, "b": 2})

    def test_after_the_handler_has_returned_nothing_is_queued(self, pipeline: QueuedPipeline) -> None:
        pipeline.end()
        with pytest.raises(TransactionMisused, match="after the handler had returned"):
            pipeline.set("a", 1)
        assert len(pipeline) == 0

    def test_what_cannot_be_encoded_is_redis_py_s_own_error(self, pipeline: QueuedPipeline) -> None:
        with pytest.raises(redis.DataError):
            pipeline.set("a", None)  # type: ignore[arg-type]
        assert len(pipeline) == 0


class TestQueue:
    def test_a_command_answers_with_the_pipeline(self, pipeline: QueuedPipeline) -> None:
        chained: Any = pipeline.set("a", 1)
        assert chained.incrby("b", 2) is pipeline
        assert len(pipeline) == 2
        assert pipeline

    def test_a_handler_that_asks_for_redis_py_s_pipeline_gets_one(self, pipeline: QueuedPipeline) -> None:
        assert isinstance(pipeline, Pipeline)
        assert RedisStore.connection_types == (Pipeline,)

    def test_a_name_of_two_words_is_two_words(self, pipeline: QueuedPipeline) -> None:
        pipeline.xgroup_create("s", "g")
        assert b"\xa6XGROUP\xa6CREATE" in pipeline.packed(0, 1)
        with pytest.raises(TransactionMisused):
            pipeline.execute_command("XGROUP HELP")

    def test_each_record_ends_where_the_next_begins_and_those_without_commands_are_left_out(
        self, pipeline: QueuedPipeline
    ) -> None:
        pipeline.next_record(10)
        pipeline.set("a", 1)
        pipeline.next_record(12)
        pipeline.next_record(15)
        pipeline.set("b", 2)
        command = b"\x93\xa3SET\xa1%b\xa1%b"
        first, second = command % (b"a", b"1"), command % (b"b", b"2")
        assert pipeline.packed(9, 17) == b"\x92" + b"\x93\xa210\xa212" + first + b"\x93\xa215\xa217" + second

    def test_a_batch_is_one_record_from_its_first_offset_to_its_last(self, pipeline: QueuedPipeline) -> None:
        pipeline.set("a", 1)
        assert pipeline.packed(9, 17).startswith(b"\x91\x93\xa19\xa217")

    @pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65535, 65536])
    def test_arguments_of_every_length_are_framed(self, pipeline: QueuedPipeline, size: int) -> None:
        pipeline.set("a", "x" * size)
        assert msgspec.msgpack.decode(pipeline.packed(0, 1)) == [["0", "1", ["SET", "a", "x" * size]]]

    @pytest.mark.parametrize("count", [1, 13, 14, 16, 65533, 65534])
    def test_records_and_commands_of_every_number_are_framed(self, pipeline: QueuedPipeline, count: int) -> None:
        pipeline.next_record(0)
        for _ in range(count):
            pipeline.set("a", 1)
        pipeline.next_record(1)
        pipeline.rpush("b", *range(20))
        first = ["0", "1", *([["SET", "a", "1"]] * count)]
        second = ["1", "2", ["RPUSH", "b", *map(str, range(20))]]
        assert msgspec.msgpack.decode(pipeline.packed(0, 2)) == [first, second]

    def test_text_numbers_and_bytes_are_what_redis_py_makes_of_them(self, pipeline: QueuedPipeline) -> None:
        given = ("ü", b"b", 7, -(2**70), 1.5)
        pipeline.rpush("a", *given)
        encode = redis.ConnectionPool(port=1).get_encoder().encode
        words = [encode(each).decode() for each in given]  # type: ignore[no-untyped-call]
        assert msgspec.msgpack.decode(pipeline.packed(0, 1)) == [["0", "1", ["RPUSH", "a", *words]]]


def wrapped(error: StoreError, how: str) -> Exception:
    """The error as a handler raises it: unchanged, with a cause, or with a context that `from None` hides."""
    if how == "unchanged":
        return error
    try:
        try:
            raise error
        except StoreError as caught:
            raise ValueError("no stock") from (caught if how == "from the cause" else None)
    except ValueError as outer:
        return outer


class TestFault:
    @pytest.mark.parametrize("how", ["unchanged", "from the cause", "from None"])
    def test_an_error_that_the_server_caused_is_the_stores_also_when_wrapped(
        self, pipeline: QueuedPipeline, how: str
    ) -> None:
        gone = StoreUnavailable("redis://localhost:1/0 cannot be reached")
        assert RedisTx(pipeline).fault(wrapped(gone, how)) is gone

    @pytest.mark.parametrize("how", ["unchanged", "from the cause", "from None"])
    def test_control_any_other_error_is_the_handlers(self, pipeline: QueuedPipeline, how: str) -> None:
        assert RedisTx(pipeline).fault(wrapped(TransactionMisused("not a command of a queue"), how)) is None


class TestNames:
    def test_ordinary_names_stay_readable(self) -> None:
        assert Names(None).row("shop", Partition("orders", 3)) == "kconsume:offset:shop:orders:3"
        assert Names("eu").row("shop", Partition("orders", 3)) == "kconsume:{eu}:offset:shop:orders:3"

    def test_no_two_partitions_share_a_name(self) -> None:
        odd = ["a", "a:b", "b", "a:", ":b", "{a}", "%3A", "a%3Ab", "a b", "ü", "", "offset", "meta"]
        rows = {Names(None).row(group, Partition(topic, 1)) for group, topic in itertools.product(odd, odd)}
        assert len(rows) == len(odd) ** 2

    @given(st.text(), st.text(), st.integers(0, 10**6))
    def test_a_topic_has_no_say_in_the_slot_and_comes_back_as_it_was(self, group: str, topic: str, number: int) -> None:
        try:
            (group + topic).encode()
        except UnicodeEncodeError:
            return  # no name of Kafka's
        partition = Partition(topic, number)
        names = Names("tag")
        assert {key_slot(key.encode()) for key in (*names.of_group(group), names.row(group, partition))} == {
            key_slot(b"tag")
        }
        assert "{" not in Names(None).row(group, partition)
        assert partition_of(member_of(partition).encode()) == partition
