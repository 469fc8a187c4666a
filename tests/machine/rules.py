"""The state machine: what may happen to one consumer, in any order, and what must hold all the while.

Driven through the client's callbacks and answers, the store and the snapshot, and nothing else of the consumer. At the
end everything that was withheld is let go and all faults are over: then every partition must come to its end (P12).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kconsume import App
from kconsume._kafka.cluster import Committed
from kconsume._runtime.plan import ConsumerPlan
from kconsume.backends import KafkaStore, Position
from kconsume.errors import TooManyFailures
from kconsume.records import Partition, Record
from tests.machine.client import Commit, FakeClient
from tests.machine.stage import Actor, Call, Question, Run, Stage, Thread, Wait, begin_work, patched, wake_lanes
from tests.machine.store import Effects, HeldStore, HeldTransactions, State
from tests.machine.world import GROUP, PARTITIONS, TOPIC, FakeCluster, World

Kind = Literal["transactions", "fenced", "kafka"]

partitions = st.sampled_from(PARTITIONS)
some_partitions = st.lists(partitions, min_size=1, max_size=3, unique=True).map(sorted)
index = st.integers(0, 7)


class Ended(Exception):
    """The consumer has ended, and had to."""


class Machine(RuleBasedStateMachine):
    """One consumer of one group."""

    kind: Kind = "transactions"
    chunk = 1

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.stage = Stage()
        self.world = World(effects_are_stored=self.kind == "transactions")
        self.stage.accepts = self._accepted
        self._made: FakeClient | None = None
        self.standby: State | None = None
        self.rival: dict[Partition, int] = {}
        """The epochs under which the rival works."""
        self.hung: set[int] = set()
        """Handler calls that never return, by the id of their worker."""
        self.stale_news = self.other_news = 0
        """What has reached the owner thread since its last turn: answers that nobody waits for, and everything else."""
        self.user_paused: set[Partition] = set()
        self.ends = False
        """Whether the rules are over, and the example is judged."""

    # The beginning

    @initialize(eager=st.booleans(), ours=some_partitions, claimed=st.booleans())
    def start(self, eager: bool, ours: list[Partition], claimed: bool) -> None:
        """We are a member, and our first records wait for a worker, or our first claims for an answer."""
        patched(self.stage, self.patch, self._make_client)
        moves: dict[Partition, int] = {}
        store_type = HeldTransactions if self.kind == "transactions" else HeldStore
        self.store = store_type(self.stage, self.world, moves)
        self.run = Run(self.stage, self._plan(eager))
        self.client.moves = moves
        self._settle()  # it subscribes, and its survey is answered
        for partition in PARTITIONS:
            self._write(partition, [1, 0])
        self._join(ours)
        self._settle(threads=claimed)
        self.check()

    @property
    def client(self) -> FakeClient:
        assert self._made is not None
        return self._made

    def _make_client(self, config: Mapping[str, Any]) -> FakeClient:
        self._made = FakeClient(self.stage, self.world, config)
        return self._made

    def _plan(self, eager: bool) -> ConsumerPlan:
        kafka = {"partition.assignment.strategy": "range"} if eager else {}
        cluster = FakeCluster(self.world)
        offsets = KafkaStore("machine:9092", cluster=cluster) if self.kind == "kafka" else self.store  # type: ignore[arg-type]
        app = App("machine:9092", group=GROUP, offsets=offsets, kafka=kafka, shutdown=10.0)
        if self.kind == "transactions":

            @app.consume(TOPIC, chunk=self.chunk, on_error="hold")
            def handle_in_transaction(record: Record, tx: Effects) -> None:
                self._handle(record)
                tx.offsets.append(record.offset)
        else:

            @app.consume(TOPIC, chunk=self.chunk, on_error="hold")
            def handle(record: Record) -> None:
                self._handle(record)
                self.world.handles(Partition(record.topic, record.partition), record.offset)

        (plan,) = app.plans()
        return dataclasses.replace(plan, store=offsets, cluster=cluster)  # type: ignore[arg-type]

    def _handle(self, record: Record) -> None:
        how = self.stage.pause(Call(Partition(record.topic, record.partition), record.offset))
        if how == "fails":
            raise LookupError("no such order")

    def _accepted(self, partition: Partition, committed: Committed) -> None:
        """The broker has accepted an offset. What counts is that of `kafka://`; of other stores it is a copy."""
        if self.kind == "kafka":
            self.world.moves(partition, committed.offset)
        self.world.committed[partition] = committed

    # Time, and the parts of the consumer

    @rule()
    def nothing_happens_for_a_while(self) -> None:
        """All that was begun comes to its end."""
        self._rounds(1)

    @rule(turns=st.integers(1, 4))
    def the_owner_goes_on(self, turns: int) -> None:
        for _ in range(turns):
            self.time_passes(0.0)

    @rule(seconds=st.sampled_from([0.1, 1.1, 4.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        """The owner thread goes on to where it waits next."""
        only_stale = self.stale_news and not self.other_news and self._between_turns and not seconds
        before = dict(self.run.waits) if only_stale else None
        self._turn(seconds)
        if before is not None and self._between_turns:
            assert dict(self.run.waits) == before, "an answer that nobody waited for has changed something"

    def _settle(self, *, threads: bool = True) -> None:
        """What has nothing to do with records comes to its end; without `threads`, only the owner goes on."""
        for _ in range(8):
            self._turn(0.0)
            if threads:
                self._run_threads()

    def _turn(self, seconds: float) -> None:
        self.stage.now += seconds
        wake_lanes(self.stage)
        owner = self.stage.owner
        assert owner is not None
        if isinstance(owner.at, Wait):
            self.stage.now += 0.0 if self._news else owner.at.seconds
        self.stale_news = self.other_news = 0
        owner.go()
        if self.store.violation is not None:
            raise self.store.violation
        if owner.ended:
            assert self._has_to_end, f"the consumer has ended: {self.run.failure!r}"
            if self.ends:
                raise Ended
            reject()

    @property
    def _has_to_end(self) -> bool:
        """Without a fence, no lane may be opened beside a handler that does not return."""
        return self.kind == "kafka" and isinstance(self.run.failure, TooManyFailures)

    @property
    def _news(self) -> int:
        return self.stale_news + self.other_news

    @property
    def _between_turns(self) -> bool:
        owner = self.stage.owner
        return owner is not None and owner.at == "poll"

    @rule(which=index, how=st.sampled_from(["on", "on", "on", "on", "away"]))
    @precondition(lambda self: any(t.busy for t in self.stage.threads))
    def go_on_in_the_background(self, which: int, how: str) -> None:
        busy = [thread for thread in self.stage.threads if thread.busy]
        self._go(busy[which % len(busy)], how)

    def _go(self, thread: Thread, how: str = "on") -> None:
        question = thread.actor.at if thread.actor is not None else None
        thread.go(how)
        if thread.actor is None:
            self._tells(question)

    def _run_threads(self) -> None:
        for thread in self.stage.threads:
            while thread.busy:
                self._go(thread)

    def _tells(self, place: object) -> None:
        """Something was answered. Stale is what was asked before its partitions came or went."""
        is_stale = (
            isinstance(place, Question)
            and place.name == "save"
            and all(self.client.moves.get(p, 0) != asked for p, asked in place.moves.items())
        )
        if is_stale:
            self.stale_news += 1
        else:
            self.other_news += 1

    @rule(calls=st.booleans())
    @precondition(lambda self: bool(self.stage.ready))
    def a_worker_begins(self, calls: bool) -> None:
        """`calls`: it comes as far as its handler call."""
        worker = begin_work(self.stage)
        self._work(worker, "on")
        while calls and not worker.ended and not isinstance(worker.at, Call):
            self._work(worker, "on")

    @rule(which=index, how=st.sampled_from(["on", "on", "on", "on", "on", "fails", "away"]))
    @precondition(lambda self: bool(self._at_work))
    def a_worker_goes_on(self, which: int, how: str) -> None:
        workers = self._at_work
        worker = workers[which % len(workers)]
        is_call = isinstance(worker.at, Call)
        if (how == "fails") != is_call and how != "on":
            how = "on"
        self._work(worker, how)

    @rule(which=index)
    @precondition(lambda self: not self.hung and any(isinstance(w.at, Call) for w in self._at_work))
    def a_handler_hangs(self, which: int) -> None:
        calls = [worker for worker in self._at_work if isinstance(worker.at, Call)]
        self.hung.add(id(calls[which % len(calls)]))

    @property
    def _at_work(self) -> list[Actor]:
        return [w for w in self.stage.workers.values() if id(w) not in self.hung and not w.ended]

    def _work(self, worker: Actor, how: str) -> None:
        worker.go(how)
        self.other_news += 1
        for lane in [lane for lane, each in self.stage.workers.items() if each.ended]:
            del self.stage.workers[lane]
        if self.store.violation is not None:
            raise self.store.violation

    # Records

    @rule(partition=partitions, gaps=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def records_are_written(self, partition: Partition, gaps: list[int]) -> None:
        self._write(partition, gaps)

    def _write(self, partition: Partition, gaps: list[int]) -> None:
        for gap in gaps:
            self.world.logs[partition].append(gap)
        self.other_news += 1

    # The group

    @rule(wanted=some_partitions)
    def the_group_gives_us(self, wanted: list[Partition]) -> None:
        """A rebalance ends: we are a member, and have these besides what we had."""
        if self._is_rebalancing:
            return
        new = [p for p in wanted if self.world.owner[p] != "us"]
        self._join(new)

    def _join(self, new: list[Partition]) -> None:
        world = self.world
        had = world.ours()
        world.generation += 1
        world.is_member = True
        if self.client.eager and had:
            self.client.will_revoke(had, lambda: None)
        world.gives(new, "us")
        self.client.will_assign(sorted([*had, *new]) if self.client.eager else new)
        self.other_news += 1

    @rule(wanted=some_partitions)
    def the_group_takes(self, wanted: list[Partition]) -> None:
        """We give these up, and only then they are the rival's."""
        world, client = self.world, self.client
        if self._is_rebalancing or not world.is_member:
            return
        had = world.ours()
        gone = [p for p in wanted if p in had]
        left = [p for p in had if p not in gone]
        if not gone:
            return

        def rejoined() -> None:
            world.generation += 1
            world.gives(gone, "rival")
            client.will_assign(left if client.eager else [])

        client.will_revoke(had if client.eager else gone, rejoined)
        self.other_news += 1

    @rule()
    def the_group_puts_us_out(self) -> None:
        """Our session has ended: the partitions are the rival's at once, and we hear of it later."""
        if self._is_rebalancing or not self.world.is_member:
            return
        self.world.generation += 1
        self.world.is_member = False
        self.world.gives(self.world.ours(), "rival")

    @rule()
    @precondition(lambda self: not self.world.is_member and self.client.generation > 0)
    def we_hear_that_we_are_out(self) -> None:
        if not self.client.events:
            self.client.will_lose_all()
            self.other_news += 1

    @property
    def _is_rebalancing(self) -> bool:
        """Whether we have still to hear of the last rebalance."""
        is_out = not self.world.is_member and self.client.generation > 0
        return bool(self.client.events) or is_out or not self._between_turns

    @rule(which=index, delivered=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: bool(self.client.commits))
    def a_commit_is_answered(self, which: int, delivered: bool) -> None:
        self._answer(self.client.commits[which % len(self.client.commits)], delivered)

    def _answer(self, commit: Commit, delivered: bool) -> None:
        is_stale = all(self.client.moves[p] != moves for p, moves in commit.moves.items())
        self.client.answer(commit, delivered=delivered)
        if is_stale:
            self.stale_news += 1
        else:
            self.other_news += 1

    # The rival

    @rule()
    @precondition(lambda self: self.kind != "kafka")
    def the_rival_claims(self) -> None:
        for partition in [p for p in PARTITIONS if self.world.owner[p] == "rival"]:
            claimed = self.store.rival_claims(partition)
            if claimed is not None:
                self.rival[partition] = claimed.epoch

    @rule(partition=partitions)
    @precondition(lambda self: self.kind != "kafka")
    def the_rival_handles(self, partition: Partition) -> None:
        if self.world.owner[partition] == "rival" and partition in self.rival:
            self.store.rival_handles(partition, self.rival[partition])

    # The store

    @rule()
    @precondition(lambda self: self.kind != "kafka")
    def a_standby_copies(self) -> None:
        self.standby = self.store.state()

    @rule()
    @precondition(lambda self: self.standby is not None)
    def the_store_fails_over(self) -> None:
        assert self.standby is not None
        self.store.fail_over_to(self.standby)

    @rule(away=st.booleans())
    def brokers_go_or_come(self, away: bool) -> None:
        self.world.brokers_away = away

    # The user

    @rule(wanted=some_partitions)
    def the_user_pauses(self, wanted: list[Partition]) -> None:
        self.run.pause(wanted)
        self.user_paused.update(wanted)
        self.other_news += 1

    @rule()
    @precondition(lambda self: bool(self.user_paused))
    def the_user_resumes(self) -> None:
        self.run.resume(sorted(self.user_paused))
        self.user_paused.clear()
        self.other_news += 1

    @rule(partition=partitions)
    @precondition(lambda self: self.kind != "kafka")
    def the_user_resets(self, partition: Partition) -> None:
        # Where a failover has lost our claim, a reset may get the very epoch that we have.
        if self.store.row(partition) is not None and partition not in self.world.failed_over:
            self.store.reset_by_user(partition, 0)
            if self.kind == "fenced":
                self.standby = None  # effects elsewhere do not tell whether they came before a reset that is undone

    # What must hold

    @invariant()
    def check(self) -> None:
        if self._made is None or not self._between_turns or self.client.events:
            return
        if self.run.failure is not None:
            assert self._has_to_end, f"the consumer ends: {self.run.failure!r}"
            return
        waits, assigned = self.run.waits, self.run.assigned
        assert assigned == set(self.client.positions), "what is ours and what the client has assigned"
        paused = {p for p in assigned if p in self.client.paused}
        requested = {p for p in assigned if p in waits}
        assert paused == requested, f"paused at the client {sorted(paused)}, and believed {sorted(requested)}"
        for partition, causes in waits.items():
            assert causes, f"{partition} does not flow, and nothing will change that"
        if self.kind == "kafka":
            calls = Counter(w.at.partition for w in self.stage.workers.values() if isinstance(w.at, Call))
            assert not calls or max(calls.values()) == 1, f"calls of one partition side by side: {calls}"

    def teardown(self) -> None:
        self.ends = True
        try:
            if self._made is not None and not self._has_to_end:
                self._come_to_rest()
        except Ended:
            return
        finally:
            self.stage.close()
            self.patch.undo()

    def _come_to_rest(self) -> None:
        """All faults are over, and whatever was withheld is let go: everything that is ours must flow."""
        self._rounds(6)
        self.the_brokers_are_back()
        if not self.world.is_member:
            if self.client.generation > 0:
                self.client.will_lose_all()
            self._rounds(3)
        self._join([p for p in PARTITIONS if self.world.owner[p] != "us"])
        self.run.resume(sorted(PARTITIONS))
        for partition in PARTITIONS:  # a reset is noticed with the next record
            self._write(partition, [0])
        for _ in range(60):
            self._rounds(1)
            if not self._unfinished():
                return
        assert not self._unfinished(), f"stands still: {self._unfinished()}"

    def the_brokers_are_back(self) -> None:
        self.world.brokers_away = False

    def _rounds(self, count: int) -> None:
        for _ in range(count):
            for _ in range(50):
                moved = self._everything_goes_on()
                self._turn(0.0)
                self.check()
                if not (moved or self._news or self.client.events):
                    break
            self._turn(1.6)
            self.check()

    def _everything_goes_on(self) -> bool:
        """Whether there was anything to do but for the owner thread."""
        moved = any(thread.busy for thread in self.stage.threads) or bool(self._at_work or self.stage.ready)
        self._run_threads()
        while self.stage.ready:
            self._work(begin_work(self.stage), "on")
        for worker in self._at_work:
            self._work(worker, "on")
        for commit in list(self.client.commits):
            moved = True
            self._answer(commit, True)
        return moved

    def _unfinished(self) -> dict[Partition, str]:
        found: dict[Partition, str] = {}
        for partition in PARTITIONS:
            if self._is_hung_here(partition):
                continue
            missing = self.world.unhandled(partition)
            row = self.store.row(partition) if self.kind != "kafka" else self.world.committed.get(partition)
            at = None if row is None else row.next_offset if isinstance(row, Position) else row.offset
            end = self.world.logs[partition].end
            if missing or (at or 0) < end:
                found[partition] = f"at {at} of {end}, unhandled {missing}, waits for {self.run.waits.get(partition)}"
        return found

    def _is_hung_here(self, partition: Partition) -> bool:
        """Whether the lane that has the partition now is the one whose handler hangs."""
        return any(
            id(w) in self.hung and self.run.has_lane(lane)
            for lane, w in self.stage.workers.items()
            if lane.partition == partition
        )
