"""`kconsume try`: one record, today's handler, nothing left behind."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kconsume import App, Partition
from kconsume.backends import open_store
from kconsume.testing.services import KafkaService
from tests.cli.conftest import APP, Shop
from tests.fix_kafka import MakeTopic, produce
from tests.waiting import eventually

PLAIN = """
    from kconsume import App, Record

    app = App("embedded://shop", group="shop")

    @app.consume("orders")
    def reserve(order: bytes, record: Record) -> None:
        print("got", order, record.id)
"""


@pytest.fixture
def stocked(shop: Shop) -> Shop:
    """The shop with its table, and an order, a tombstone and a bad order in partition 1 of 2."""
    shop.broker(orders=2)
    shop.order(b'{"id": 7}', None, b"\xff{", partition=1)
    shop.make_table()
    return shop


def test_a_record_that_passes_is_shown_and_its_effect_is_rolled_back(stocked: Shop) -> None:
    stocked.write("shop")
    tried = stocked.run("try", "shop:app", "orders/1@0")

    assert tried.returncode == 0
    assert tried.stdout.startswith("orders/1@0  20")
    assert 'value    {"id": 7}' in tried.stdout
    assert "what it does elsewhere (a call, a file, a message) is real" in tried.stdout
    assert tried.stdout.endswith("passes; its writes were rolled back\n")
    assert stocked.reserved() == []


def test_the_handler_sees_its_own_writes_while_it_is_tried(stocked: Shop) -> None:
    look = 'assert tx.execute("select count(*) from reserved").fetchone() == (1,)'
    stocked.write("shop", f"{APP}        {look}\n")

    assert stocked.run("try", "shop", "orders/1@0").returncode == 0
    assert stocked.reserved() == []


def test_a_handler_without_a_transaction_is_announced_as_real(stocked: Shop) -> None:
    stocked.write("shop", PLAIN)
    tried = stocked.run("try", "shop", "orders/1@0")

    assert tried.returncode == 0
    assert "it takes no transaction: everything it does is real" in tried.stdout
    assert "got b'{\"id\": 7}'" in tried.stdout


def test_the_record_has_the_same_id_as_in_a_run(stocked: Shop) -> None:
    stocked.write("shop", PLAIN.replace("order: bytes", "order: bytes | None"))
    tried = stocked.run("try", "shop", "orders/1@0")
    running = stocked.start("run", "shop", PYTHONUNBUFFERED="1")
    eventually(lambda: len(running.out.splitlines()) == 3, what="three records in a run")

    assert tried.returncode == 0
    assert running.out.splitlines()[0] in tried.stdout


def test_trying_moves_no_offset(stocked: Shop) -> None:
    stocked.write("shop")
    assert stocked.run("try", "shop", "orders/1@0").returncode == 0
    running = stocked.start("run", "shop")
    running.await_err("partitions assigned partitions=2 at=orders/0@0,orders/1@0")


def test_trying_beside_a_run_moves_no_offset_and_is_in_no_group(
    shop: Shop, kafka: KafkaService, kafka_admin: AdminClient, topic: MakeTopic, group: str
) -> None:
    orders = topic(1)
    produce(kafka.bootstrap, orders, ["first", "second"])
    app, place, handled = App(kafka.bootstrap, group=group), Partition(orders, 0), list[str]()
    plain = PLAIN.replace("embedded://shop", kafka.bootstrap).replace('"orders"', repr(orders))
    shop.write("shop", plain.replace('group="shop"', f"group={group!r}"))

    @app.consume(orders)
    def handle(order: str) -> None:
        handled.append(order)

    def offset() -> int | None:
        position = open_store("kafka://", brokers=kafka.bootstrap).load(group, [place]).get(place)
        return None if position is None else position.next_offset

    def members() -> set[str]:
        (described,) = kafka_admin.describe_consumer_groups([group]).values()
        return {member.member_id for member in described.result(20).members}

    with app.running():
        eventually(lambda: offset() == 2, what="both are handled, and committed")
        before = members(), app.rebalances()
        tried = shop.run("try", "shop", f"{orders}/0@0")
        assert (tried.returncode, tried.stderr) == (0, "")
        assert f"got b'first' {group}:" in tried.stdout
        assert (members(), app.rebalances()) == before, "nobody has joined"
        assert offset() == 2
        groups = [each.group_id for each in kafka_admin.list_consumer_groups().result(20).valid]
        assert [name for name in groups if "kconsume-reader" in name] == [], "nothing is committed for any other group"
    assert handled == ["first", "second"]


def test_a_decode_error_and_a_tombstone_fail_in_words(stocked: Shop) -> None:
    stocked.write("shop")
    tombstone, broken = stocked.run("try", "shop", "orders/1@1"), stocked.run("try", "shop", "orders/1@2")

    assert (tombstone.returncode, broken.returncode) == (1, 1)
    assert "value    (null)" in tombstone.stdout
    assert "annotate it as Order | None to get tombstones as None" in tombstone.stdout
    assert r"value    b'\xff{'" in broken.stdout
    assert "DecodeError: the value is not Order" in broken.stdout
    assert "Traceback" not in tombstone.stdout + broken.stdout


def test_a_handler_that_commits_by_itself_fails_as_in_a_run(stocked: Shop) -> None:
    stocked.write("shop", f"{APP}        tx.commit()\n")
    tried = stocked.run("try", "shop", "orders/1@0")

    assert tried.returncode == 1
    assert "TransactionMisused: a handler must not begin, commit or roll back" in tried.stdout
    assert stocked.reserved() == []


def test_as_json_one_document_says_how_it_went(stocked: Shop) -> None:
    stocked.write("shop", APP.replace("tx.execute(", "order.missing; tx.execute("))
    tried = stocked.run("try", "shop", "orders/1@0", "--json")
    outcome = json.loads(tried.stdout)

    assert tried.returncode == 1
    assert outcome["record"] == "orders/1@0"
    assert outcome["handler"] == "reserve"
    assert (outcome["passes"], outcome["rolled_back"]) == (False, True)
    assert outcome["error"].startswith("AttributeError")
    assert outcome["trace"].startswith("Traceback")


def test_the_debugger_stands_where_the_handler_failed(stocked: Shop) -> None:
    stocked.write("shop", APP.replace("tx.execute(", "order.missing; tx.execute("))
    tried = stocked.run("try", "shop", "orders/1@0", "--pdb", stdin="p 'seen', order.id\nq\n")

    assert tried.returncode == 1
    assert "(Pdb) ('seen', 7)" in tried.stdout


ASYNC = (
    APP.replace("def reserve(", "async def reserve(").replace("import msgspec", "import asyncio, msgspec")
    + """\
        await asyncio.sleep(0)
"""
)


def test_an_async_handler_is_tried_and_rolled_back_too(stocked: Shop) -> None:
    look = 'assert tx.execute("select count(*) from reserved").fetchone() == (1,)'
    stocked.write("shop", f"{ASYNC}        {look}\n")
    tried = stocked.run("try", "shop", "orders/1@0")

    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.endswith("passes; its writes were rolled back\n")
    assert stocked.reserved() == []


def test_the_debugger_stands_where_an_async_handler_failed(stocked: Shop) -> None:
    stocked.write("shop", f"{ASYNC}        order.missing\n")
    tried = stocked.run("try", "shop", "orders/1@0", "--pdb", stdin="p 'seen', order.id\nq\n")

    assert tried.returncode == 1
    assert "(Pdb) ('seen', 7)" in tried.stdout
    assert stocked.reserved() == []


def test_a_handler_of_batches_gets_a_batch_of_that_record(stocked: Shop) -> None:
    batches = """
    from kconsume import App, Batch

    app = App("embedded://shop", group="shop")

    @app.consume("orders")
    def reserve(orders: list[bytes | None], batch: Batch) -> None:
        print("got", orders, len(batch), batch.first)
    """
    stocked.write("shop", batches)
    tried = stocked.run("try", "shop", "orders/1@1")

    assert tried.returncode == 0, tried.stderr
    assert "got [None] 1 1" in tried.stdout


FURNISHED = """
    from typing import AsyncIterator, Iterator
    from kconsume import App, Outgoing, Record, Sender

    app = App("embedded://shop", group="shop")

    class Client: ...

    @app.resource
    async def client() -> AsyncIterator[Client]:
        print("opened")
        yield Client()
        print("closed")

    @app.wrap
    def around(record: Record) -> Iterator[None]:
        print("before", record.offset)
        yield
        print("after")

    @app.consume("orders", to="shipped", on_error="skip")
    def ship(order: bytes, client: Client, sender: Sender) -> Outgoing:
        print("called with", type(client).__name__)
        sender.send("audit", order, headers={"by": "ship"})
        return Outgoing({"done": True}, key="7")
"""


def test_its_resources_are_built_and_closed_and_wraps_go_around_it(stocked: Shop) -> None:
    stocked.write("shop", FURNISHED)
    tried = stocked.run("try", "shop", "orders/1@0")

    assert tried.returncode == 0, tried.stderr
    assert "built for it: Client" in tried.stdout
    said = [
        line
        for line in tried.stdout.splitlines()
        if line.split()[0] in {"opened", "before", "called", "after", "closed"}
    ]
    assert said == ["opened", "before 0", "called with Client", "after", "closed"]


def test_what_it_sends_is_shown_and_not_sent(stocked: Shop) -> None:
    stocked.write("shop", FURNISHED)
    told, as_json = stocked.run("try", "shop", "orders/1@0"), stocked.run("try", "shop", "orders/1@0", "--json")

    assert (told.returncode, as_json.returncode) == (0, 0)
    assert "what it sends through kconsume is shown here, and not sent" in told.stdout
    assert (
        'would send to audit\n  key      (null)\n  header   by = ship\n  value    {"id": 7}\n'
        'would send to shipped\n  key      7\n  value    {"done":true}\npasses\n'
    ) in told.stdout
    assert json.loads(as_json.stdout.splitlines()[-1])["sent"] == [
        {"topic": "audit", "key": None, "value": '{"id": 7}', "headers": [["by", "ship"]]},
        {"topic": "shipped", "key": "7", "value": '{"done":true}', "headers": []},
    ]
    assert set(stocked.broker().topics()) <= {"orders", "shipped"}, "audit was sent to"


def test_a_record_that_a_run_would_skip_fails_here_in_full_and_sends_nothing(stocked: Shop) -> None:
    stocked.write(
        "shop", f'{FURNISHED}        raise ValueError("no such sku")\n'.replace("return Outgoing", "Outgoing")
    )
    tried = stocked.run("try", "shop", "orders/1@0")

    assert tried.returncode == 1
    assert "fails: ValueError: no such sku" in tried.stdout
    assert "in a run: a record that fails is logged, counted and skipped" in tried.stdout
    assert "would send" not in tried.stdout
    assert "closed" in tried.stdout


def test_a_resource_that_cannot_be_built_is_an_error_in_words(stocked: Shop) -> None:
    stocked.write("shop", FURNISHED.replace('print("opened")', 'raise OSError("no network")'))
    tried = stocked.run("try", "shop", "orders/1@0")

    assert tried.returncode == 1
    assert "error: the resource client could not be built: OSError: no network" in tried.stderr


def test_the_app_can_come_from_the_environment(stocked: Shop) -> None:
    stocked.write("shop")

    assert stocked.run("try", "orders/1@0", KCONSUME_APP="shop:app").returncode == 0


def test_a_topic_with_handlers_in_two_groups_asks_which(stocked: Shop) -> None:
    other = """
    @app.consume("orders", group="audit")
    def audit(order: bytes, record: Record) -> None:
        print("audited", record.id)
"""
    stocked.write("shop", APP + other)
    unsaid, said = (
        stocked.run("try", "shop", "orders/1@0"),
        stocked.run("try", "shop", "orders/1@0", "--handler", "audit"),
    )

    assert unsaid.returncode == 2
    assert "choose one with --handler reserve or audit" in unsaid.stderr
    assert said.returncode == 0
    assert "audited audit:" in said.stdout, "it is tried as a part of its own group"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("orders/1@3", "there is no record orders/1@3: orders/1 holds 0 to 2; that offset is not written yet"),
        ("orders/0@0", "orders/0 is empty"),
        ("orders/2@0", "has 2 partitions, numbered from 0"),
        ("order/0@0", "no handler for topic 'order': it handles orders"),
        ("orders/0", "not a record"),
        ("orders@0", "not a partition"),
    ],
)
def test_a_record_that_is_not_there_is_an_error_that_says_what_is(stocked: Shop, place: str, told: str) -> None:
    stocked.write("shop")
    refused = stocked.run("try", "shop", place)

    assert refused.returncode == 2
    assert told in refused.stderr


def test_a_record_that_retention_has_deleted_is_an_error(stocked: Shop) -> None:
    stocked.write("shop")
    stocked.broker().delete_records("orders", 1, 2)
    refused = stocked.run("try", "shop", "orders/1@0")

    assert refused.returncode == 2
    assert "orders/1 holds 2 to 2; that offset is deleted by retention" in refused.stderr


@pytest.mark.parametrize(
    ("address", "told"), [("embedded://", "ended with this process"), ("embedded://shop", "not running")]
)
def test_a_broker_that_is_gone_is_an_error_and_is_not_started(shop: Shop, address: str, told: str) -> None:
    shop.write("shop", APP.replace("embedded://shop", address))
    refused = shop.run("try", "shop", "orders/0@0")

    assert refused.returncode == 2
    assert told in refused.stderr
    assert shop.processes() == []


def test_the_mark_of_a_transaction_is_no_record(shop: Shop, kafka: KafkaService, topic: MakeTopic) -> None:
    orders = topic(1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": orders})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(orders, b'{"id": 1}')
    producer.commit_transaction(20)
    shop.make_table()
    shop.write("shop", APP.replace("embedded://shop", kafka.bootstrap).replace('"orders"', repr(orders)))
    record, mark = shop.run("try", "shop", f"{orders}/0@0"), shop.run("try", "shop", f"{orders}/0@1")

    assert record.returncode == 0, record.stderr
    assert mark.returncode == 2
    assert "the offset is a gap" in mark.stderr
