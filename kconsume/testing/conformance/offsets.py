"""The first level: a store that keeps offsets.

The docstring of a test names the failure that the test prevents. The tests assume nothing about owners or transactions.
If the store records owners, all tests act as the same owner.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import pytest

from kconsume._kafka.cluster import Cluster, Committed
from kconsume._runtime.assignment.claims import Claims
from kconsume.backends.base import OffsetStore, Position
from kconsume.backends.capabilities import (
    AsyncDryRunStore,
    AsyncTransactionalStore,
    DecidingStore,
    DryRunStore,
    NamedStore,
    NotingStore,
    OutboxStore,
    PipeliningStore,
    capabilities_of,
)
from kconsume.errors import KconsumeError, StoreUnavailable, TopicRecreated
from kconsume.records import Partition
from kconsume.testing.conformance.harness import Bench, at_once, once_it_is_back
from kconsume.testing.conformance.subject import Subject

ODD_NAMES = [
    "it's",
    'say "hi"',
    "a;drop table kconsume_offsets;--",
    "ü/☕ b",
    "%",
    "back\\slash",
    "a\nb",
    "a:b:c",
    "x ",
    "{tag}",
    "*",
    "?[a-z]",
    "$1 %s {0}",
    "../up",
]


PARTS: list[tuple[str, type]] = [
    ("async_transactional", AsyncTransactionalStore),
    ("pipelining", PipeliningStore),
    ("outbox", OutboxStore),
    ("noting", NotingStore),
    ("named", NamedStore),
    ("deciding", DecidingStore),
    ("dry_run", DryRunStore),
    ("async_dry_run", AsyncDryRunStore),
]
"""The capabilities that a store may declare, and the protocol that it must then implement."""


class OffsetsSuite:
    """Subclass it as `Test…`, with a fixture `subject` that returns a `Subject`."""

    @pytest.fixture
    def subject(self) -> Subject:
        raise NotImplementedError("a subclass of a conformance suite needs a fixture `subject` that gives a Subject")

    @pytest.fixture
    def bench(self, subject: Subject) -> Iterator[Bench]:
        with Bench(subject) as bench:
            yield bench

    def test_load_omits_a_partition_without_a_row(self, bench: Bench) -> None:
        """An invented position would be taken for a stored one, and `start=` would never be used."""
        assert bench.rows() == {}
        bench.move({bench.partitions[1]: 7})
        assert bench.offsets() == {bench.partitions[1]: 7}

    def test_a_saved_offset_is_loaded(self, bench: Bench) -> None:
        wanted = {p: 10 * p.number for p in bench.partitions}
        bench.move(wanted)
        assert bench.offsets() == wanted

    def test_a_saved_offset_is_loaded_by_another_store_object(self, bench: Bench) -> None:
        """Offsets that are kept in the object are lost with the process."""
        first, *_ = bench.partitions
        bench.move({first: 7})
        assert bench.open().load(bench.group, [first]) == bench.rows()

    def test_several_store_objects_may_make_the_first_use_at_once(self, bench: Bench) -> None:
        """The processes of a service start together, on a database without tables."""
        stores = [bench.open() for _ in range(8)]

        def use(each: int, gate: threading.Barrier) -> Mapping[Partition, Position]:
            gate.wait()
            return stores[each].load(bench.group, bench.partitions)

        assert at_once(8, use) == [{}] * 8

    def test_load_returns_only_the_requested_partitions(self, bench: Bench) -> None:
        """The partitions may be an iterator, which can be consumed once."""
        first, second, *_ = bench.partitions
        bench.move({first: 1, second: 2})
        assert bench.store.load(bench.group, iter([second])).keys() == {second}

    def test_load_and_save_of_no_partitions_do_nothing(self, bench: Bench) -> None:
        """An empty list in a statement is a syntax error in many languages."""
        assert bench.store.load(bench.group, []) == {}
        bench.store.save(bench.group, {})
        assert bench.rows() == {}

    @pytest.mark.parametrize("offset", [2**31, 2**53 + 1, 2**62])
    def test_an_offset_has_64_bits(self, bench: Bench, offset: int) -> None:
        """A column of 32 bits, or a float, cannot hold the offsets of a busy partition."""
        first, *_ = bench.partitions
        bench.move({first: offset})
        assert bench.offsets() == {first: offset}

    def test_an_offset_never_goes_backwards(self, bench: Bench) -> None:
        """Otherwise a late save, from a commit that was retried, would make the app handle records twice."""
        first, *_ = bench.partitions
        bench.move({first: 10})
        with contextlib.suppress(KconsumeError):
            bench.move({first: 9})
        assert bench.offsets() == {first: 10}

    def test_the_same_offset_may_be_saved_again(self, bench: Bench) -> None:
        """A save is repeated if its reply was lost."""
        first, *_ = bench.partitions
        bench.move({first: 10})
        bench.move({first: 10})
        assert bench.offsets() == {first: 10}

    def test_a_save_that_is_not_stored_raises_an_error(self, bench: Bench) -> None:
        """The store must not ignore a partition that does not exist, or that this consumer does not own."""
        unknown = Partition(bench.subject.topic, 99)
        with pytest.raises(KconsumeError):
            bench.store.save(bench.group, {bench.partitions[0]: Position(5), unknown: Position(5)})

    def test_a_reset_can_set_any_offset(self, bench: Bench) -> None:
        """A user sets an offset back to handle records again, forward to skip records, or where no row exists."""
        first, second, *_ = bench.partitions
        bench.move({first: 10})
        bench.store.reset(bench.group, {first: 3, second: 2**40})
        assert bench.offsets() == {first: 3, second: 2**40}

    def test_after_a_reset_claim_and_save_continue_from_the_new_offset(self, bench: Bench) -> None:
        """The highest offset so far must not remain a lower bound."""
        first, *_ = bench.partitions
        bench.move({first: 10})
        bench.store.reset(bench.group, {first: 3})
        assert bench.me.claim(first)[first].next_offset == 3
        bench.move({first: 4})
        assert bench.offsets() == {first: 4}

    def test_delete_removes_the_rows_of_one_group_only(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        other = bench.of_group(f"other-{uuid.uuid4().hex}")
        bench.move({first: 1})
        other.move({first: 2})
        bench.store.delete(bench.group)
        assert bench.rows() == {}
        assert other.offsets() == {first: 2}
        other.store.delete(other.group)

    def test_deleting_a_missing_group_is_no_error(self, bench: Bench) -> None:
        """A cleanup script may run twice."""
        bench.store.delete(bench.group)
        bench.store.delete(bench.group)

    def test_delete_removes_only_the_given_partitions_or_raises(self, bench: Bench) -> None:
        first, second, *_ = bench.partitions
        bench.move({first: 1, second: 2})
        try:
            bench.store.delete(bench.group, [first])
        except KconsumeError:
            assert bench.offsets() == {first: 1, second: 2}
        else:
            assert bench.offsets() == {second: 2}

    def test_the_groups_that_have_rows_are_listed_sorted(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        other = bench.of_group(f"a-{bench.group}")
        assert bench.group not in bench.store.groups()
        bench.move({first: 1})
        other.move({first: 1})
        listed = bench.store.groups()
        assert [g for g in listed if g in (bench.group, other.group)] == [other.group, bench.group]
        assert listed == sorted(listed)
        other.store.delete(other.group)
        assert other.group not in bench.store.groups()

    def test_groups_do_not_see_each_other_s_offsets(self, bench: Bench) -> None:
        """Two services on one database, each with the same topic."""
        first, *_ = bench.partitions
        bench.move({first: 7})
        assert bench.of_group(f"other-{uuid.uuid4().hex}").rows() == {}

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_a_group_may_have_any_name(self, bench: Bench, name: str) -> None:
        """A name that is pasted into a statement or a key can break it, or match other names."""
        first, *_ = bench.partitions
        odd = bench.of_group(f"{name}{bench.group}")
        bench.move({first: 3})
        odd.move({first: 7})
        assert odd.offsets() == {first: 7}
        assert odd.group in odd.store.groups()
        odd.store.delete(odd.group)
        assert odd.rows() == {}
        assert bench.offsets() == {first: 3}

    def test_a_topic_s_id_is_kept_with_the_offset(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.move({first: 7}, topic_id="Qm9v-aGFo_w")
        assert bench.rows()[first].topic_id == "Qm9v-aGFo_w"

    def test_an_unknown_topic_id_never_overwrites_a_known_one(self, bench: Bench) -> None:
        """Not every broker reports the topic id. The known id must stay, to be compared with the next reported id."""
        first, *_ = bench.partitions
        bench.move({first: 7}, topic_id="known")
        bench.move({first: 8}, topic_id=None)
        assert bench.rows()[first].topic_id == "known"

    def test_a_known_topic_id_overwrites_an_unknown_one(self, bench: Bench) -> None:
        first, *_ = bench.partitions
        bench.move({first: 7})
        bench.move({first: 8}, topic_id="known")
        assert bench.rows()[first].topic_id == "known"

    def test_a_recreated_topic_raises_an_error_and_keeps_the_offset(self, bench: Bench) -> None:
        """The offset has no meaning in the new log: a consumer that continues there would skip or repeat records."""
        first, *_ = bench.partitions
        began = _claims(bench, "one").claim_all([first])
        bench.me.held.update(began)
        bench.me.save({first: 7}, topic_id=began[first].topic_id)
        assert _claims(bench, "one").claim_all([first])[first].next_offset == 7
        with pytest.raises(TopicRecreated, match=r"offset 7 of topic id one.*now has id two"):
            _claims(bench, "two").claim_all([first])
        assert bench.offsets() == {first: 7}

    def test_the_leader_epoch_is_kept_with_the_offset(self, bench: Bench) -> None:
        """With the epoch the client notices that the log was truncated below the offset after a change of leader."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.save({first: 7}, leader_epoch=4)
        assert bench.rows()[first].leader_epoch == 4
        assert bench.me.claim(first)[first].leader_epoch == 4

    def test_a_reset_removes_the_leader_epoch(self, bench: Bench) -> None:
        """With the epoch of the old record, the client would take the new offset for a truncated log."""
        first, *_ = bench.partitions
        bench.me.claim(first)
        bench.me.save({first: 7}, leader_epoch=4)
        bench.store.reset(bench.group, {first: 2})
        assert bench.rows()[first].leader_epoch is None

    def test_a_reset_removes_the_topic_id(self, bench: Bench) -> None:
        """The new offset is for the topic that exists now. So a user can continue in a recreated topic."""
        first, *_ = bench.partitions
        bench.move({first: 7}, topic_id="old")
        bench.store.reset(bench.group, {first: 0})
        assert bench.rows()[first].topic_id is None

    def test_a_closed_store_can_be_used_again(self, bench: Bench) -> None:
        """An app closes its stores at the end of a run, and may run again."""
        first, *_ = bench.partitions
        bench.move({first: 7})
        bench.store.close()
        assert bench.offsets() == {first: 7}
        bench.move({first: 8})
        assert bench.offsets() == {first: 8}

    def test_a_store_can_be_closed_unused_and_twice(self, bench: Bench) -> None:
        """An app that fails at its start closes the stores that it has opened."""
        store = bench.open()
        store.close()
        store.close()

    def test_a_store_has_a_guarantee_and_an_address(self, bench: Bench) -> None:
        """The start banner prints the guarantee and the address."""
        assert "once" in bench.store.guarantee
        assert bench.store.address.partition("://")[1] == "://"

    @pytest.mark.parametrize(("part", "protocol"), PARTS)
    def test_a_declared_capability_is_implemented(self, bench: Bench, part: str, protocol: type) -> None:
        """The runtime calls the declared methods without a check."""
        offers, name = capabilities_of(bench.store), type(bench.store).__name__
        assert offers.store is bench.store, f"{name} declares the capabilities of another object"
        declared = getattr(offers, part)
        if declared is not None:
            assert isinstance(declared, protocol), f"{name} declares {part} and is no {protocol.__name__}"
            assert declared is bench.store, f"{name} declares another object as {part}"

    def test_an_outage_raises_store_unavailable_and_loses_no_offset(self, bench: Bench) -> None:
        """The runtime tries again after `StoreUnavailable`. Any other error would end the consumer."""
        first, *_ = bench.partitions
        bench.move({first: 7})
        with away(bench):
            for name, method in self.methods(bench).items():
                _says_it_is_away(name, method, bench.store)
        assert once_it_is_back(bench.offsets) == {first: 7}

    def methods(self, bench: Bench) -> Mapping[str, Callable[[OffsetStore], object]]:
        """Every method that contacts the place, by name."""
        first, *_ = bench.partitions
        return {
            "load": lambda store: store.load(bench.group, [first]),
            "save": lambda store: store.save(bench.group, {first: bench.me.held[first]}),
            "reset": lambda store: store.reset(bench.group, {first: 1}),
            "delete": lambda store: store.delete(bench.group),
            "groups": lambda store: store.groups(),
        }


def away(bench: Bench) -> AbstractContextManager[object]:
    """Make the place unavailable during the block. Skips the test if the subject cannot do that."""
    if bench.subject.away is None:
        pytest.skip("the Subject has no away=")
    return bench.subject.away()


def _says_it_is_away(name: str, method: Callable[[OffsetStore], object], store: OffsetStore) -> None:
    try:
        method(store)
    except StoreUnavailable:
        return
    except Exception as error:  # noqa: BLE001  (any other error is what the test looks for)
        pytest.fail(f"{name} raised {error!r} and not StoreUnavailable")
    pytest.fail(f"{name} succeeded although the place was unavailable")


class _Logs(Cluster):
    """A cluster in which every topic has the same id, and every log begins at 0."""

    def __init__(self, topic_id: str) -> None:
        super().__init__("nowhere:9092", {})
        self._id = topic_id

    def topics(self, wanted: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(wanted, 1)

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str | None]:
        return dict.fromkeys(topics, self._id)

    def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, Committed]:  # noqa: ARG002
        return {}

    def edges(self, partitions: Iterable[Partition], edge: Literal["earliest", "latest"]) -> dict[Partition, int]:  # noqa: ARG002
        return dict.fromkeys(partitions, 0)


def _claims(bench: Bench, topic_id: str) -> Claims:
    return Claims(bench.store, _Logs(topic_id), bench.group, "me", lambda _: "earliest")
