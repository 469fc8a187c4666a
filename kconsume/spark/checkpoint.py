"""A query's checkpoint: its offset log read, and the folder that a stream may go on with.

The store is the truth, the checkpoint a log that can be thrown away. `CheckpointGuard` compares the two before a query
starts: where they agree the folder is used again, else a new generation of it (`gen-0002`) begins where the store
stands. Nothing here writes into a folder of Spark's.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from kconsume.errors import CheckpointMismatch, ConfigurationError, OffsetError
from kconsume.records import Partition
from kconsume.spark.offset_log import first_offsets, kafka_offsets, read_entry
from kconsume.spark.query import java_class
from kconsume.spark.ranges import Offsets, Plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("kconsume.spark")
_MARK = "kconsume.json"


class Files(Protocol):
    """A folder, wherever it is."""

    def read(self, path: str) -> str | None:
        """The text of a file, None if it is not there."""
        ...

    def names(self, path: str) -> list[str]:
        """What is in a folder; nothing if it is not there."""
        ...

    def write(self, path: str, text: str) -> None:
        """Make a file, whole or not at all. Whoever else makes it writes the same into it."""
        ...


class LocalFiles:
    """On this machine: read without the JVM, through which it takes a hundred times as long, once in every batch."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def read(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text()
        except FileNotFoundError:
            return None

    def names(self, path: str) -> list[str]:
        folder = self._root / path
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []

    def write(self, path: str, text: str) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        beside.write_text(text)
        beside.rename(file)


class HadoopFiles:
    """On whatever Hadoop's file systems reach, through the driver's JVM."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._path_of = java_class(spark, "org.apache.hadoop.fs.Path")
        self._text_of = java_class(spark, "org.apache.commons.io.IOUtils").toString
        self._root = self._path_of(root)
        self._files = _file_system(spark, self._root)

    def read(self, path: str) -> str | None:
        file = self._path(path)
        if not self._files.exists(file):
            return None
        opened = self._files.open(file)
        try:
            return cast(str, self._text_of(opened, "UTF-8"))
        finally:
            opened.close()

    def names(self, path: str) -> list[str]:
        folder = self._path(path)
        if not self._files.exists(folder):
            return []
        return sorted(str(each.getPath().getName()) for each in self._files.listStatus(folder))

    def write(self, path: str, text: str) -> None:
        file = self._path(path)
        beside = self._path_of(file.getParent(), f".{file.getName()}.{uuid.uuid4().hex}")
        opened = self._files.create(beside, False)
        try:
            opened.write(text.encode())
        finally:
            opened.close()
        if not self._files.rename(beside, file):  # as on HDFS, where a file that is there stays as it is
            self._files.delete(beside, False)
            if not self._files.exists(file):
                raise ConfigurationError(
                    f"Hadoop could not rename {beside.toString()} to {file.toString()}: give the Spark session the "
                    f"right to write there, or leave checkpoint= out: the offsets are in the store"
                )

    def _path(self, path: str) -> Any:
        return self._path_of(self._root, path) if path else self._root  # Hadoop has no empty path


def qualified(spark: SparkSession, folder: str) -> str:
    """The folder with its file system, as Spark understands it: one without a scheme is on `fs.defaultFS`. Refused if
    this session cannot reach it."""
    from py4j.protocol import Py4JJavaError

    try:
        path = java_class(spark, "org.apache.hadoop.fs.Path")(folder)
        files = _file_system(spark, path)
        path = files.makeQualified(path)
        files.exists(path)
        return cast(str, path.toString())
    except Py4JJavaError as error:
        raise ConfigurationError(
            f"checkpoint={folder!r} cannot be used: {error.java_exception}; name a folder that this Spark session can "
            f"read and write (spark.hadoop.fs.* says how it is reached), or leave checkpoint= out: the offsets are in "
            f"the store"
        ) from error


def files_at(spark: SparkSession, root: str) -> Files:
    """`root`: a folder with its file system, as `qualified` and Spark give it."""
    if root.startswith("file:/"):
        return LocalFiles("/" + root.removeprefix("file:").lstrip("/"))
    return HadoopFiles(spark, root)


def _file_system(spark: SparkSession, path: Any) -> Any:
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())


class OffsetLog:
    """The batches of one query, from its checkpoint."""

    def __init__(self, files: Files, folder: str = "") -> None:
        self._files = files
        self._folder = f"{folder}/" if folder else ""
        self._last: tuple[int, dict[Partition, int]] | None = None

    def plan(self, batch: int) -> Plan:
        """What the batch covers. Its end was written before it ran; its beginning is the end of the one before."""
        source, end = self._end(batch)
        if self._last is not None and self._last[0] == batch - 1:
            start = self._last[1]
        elif batch > 0:
            _, start = self._end(batch - 1)
        else:
            start = self._first(source)
        self._last = (batch, end)
        return Plan.between(start, end)

    def last(self) -> tuple[int, bool] | None:
        """The last batch that was planned, and whether Spark takes it for done; None if there is none."""
        planned = _numbers(self._files.names(f"{self._folder}offsets"))
        if not planned:
            return None
        return planned[-1], planned[-1] in _numbers(self._files.names(f"{self._folder}commits"))

    @property
    def is_stateful(self) -> bool:
        """Whether the query keeps rows from one batch to the next. Spark makes the folder of such a query when it plans
        the first batch, before it calls the handler."""
        return bool(self._files.names(f"{self._folder}state"))

    def _end(self, batch: int) -> tuple[int, dict[Partition, int]]:
        text = self._files.read(f"{self._folder}offsets/{batch}")
        if text is None:
            raise OffsetError(f"the checkpoint has no offsets of batch {batch}, so what it covers is not known")
        return kafka_offsets(read_entry(text))

    def _first(self, source: int) -> dict[Partition, int]:
        text = self._files.read(f"{self._folder}sources/{source}/0")
        if text is None:
            raise OffsetError(f"the checkpoint has no sources/{source}/0, so where batch 0 begins is not known")
        return first_offsets(text)


def _numbers(names: list[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isdecimal())


@dataclass(frozen=True, slots=True)
class Location:
    """Where a query keeps its checkpoint."""

    folder: str
    """Below the base."""
    fresh: bool
    """Whether it is empty, so that the query begins where the store stands."""
    pending: Plan | None = None
    """The batch that Spark will run again in it."""


class CheckpointGuard:
    """Chooses the generation of a checkpoint folder that agrees with the store."""

    def __init__(self, files: Files, base: str, identity: Mapping[str, str]) -> None:
        """`identity`: what the folder belongs to: the group, the handler, what it reads."""
        self._files = files
        self._base = base
        self._identity = dict(identity)

    def peek(self, stored: Offsets) -> Plan | None:
        """The batch that Spark would run again, if the folder agrees with the store."""
        self._must_be_ours()
        generations = self._generations()
        found = OffsetLog(self._files, generations[-1]).last() if generations else None
        if found is None or found[1]:
            return None
        plan = OffsetLog(self._files, generations[-1]).plan(found[0])
        return Plan(plan.filled) if agrees(plan, stored, done=False) else None

    def resolve(self, stored: Offsets) -> Location:
        self._must_be_ours()
        generations = self._generations()
        if not generations:
            return self._new(1)
        last = generations[-1]
        log = OffsetLog(self._files, last)
        found = log.last()
        if found is None:
            return Location(last, fresh=True)
        batch, done = found
        plan = log.plan(batch)
        if agrees(plan, stored, done=done):
            return Location(last, fresh=False, pending=None if done else plan)
        _log.warning(
            "the checkpoint and the store disagree, and the store wins: checkpoint=%s/%s batch=%d covers=%s store=%s "
            "new=%s", self._base, last, batch, plan, _said(stored, plan), f"gen-{int(last[4:]) + 1:04}",
        )  # fmt: skip
        return self._new(int(last[4:]) + 1)

    def _generations(self) -> list[str]:
        return [name for name in self._files.names("") if name.startswith("gen-") and name[4:].isdecimal()]

    def _new(self, number: int) -> Location:
        if self._files.read(_MARK) is None:  # one that is there is ours
            self._files.write(_MARK, msgspec.json.encode(self._identity).decode())
        return Location(f"gen-{number:04}", fresh=True)

    def _must_be_ours(self) -> None:
        mark = self._files.read(_MARK)
        if mark is None:
            if strange := {"offsets", "metadata", "commits"}.intersection(self._files.names("")):
                raise CheckpointMismatch(
                    f"checkpoint={self._base!r} is the checkpoint of a query that is not kconsume's (it has "
                    f"{', '.join(sorted(strange))}): name an empty folder; the offsets are in the store"
                )
            return
        known = msgspec.json.decode(mark, type=dict[str, str])
        for what, value in self._identity.items():
            if known.get(what) != value:
                raise CheckpointMismatch(
                    f"checkpoint={self._base!r} belongs to another query: its {what} is {known.get(what)!r}, and "
                    f"here it is {value!r}; name a folder of its own, for the offsets are in the store"
                )


def agrees(plan: Plan, stored: Offsets, *, done: bool) -> bool:
    """Whether a query that goes on behind (`done`), or with, its last batch does what the store says is to be done.

    Each partition stands at the end of the batch; or, if Spark runs the batch again, at its beginning. Partitions that
    only the store knows are new to Spark, which begins them at 0."""
    for each in plan.ranges:
        at = stored.get(each.partition)
        if at != each.end and (done or at != each.first):
            return False
    known = set(plan.partitions)
    return all(offset == 0 for partition, offset in stored.items() if partition not in known)


def _said(stored: Offsets, plan: Plan) -> str:
    return ",".join(f"{p}@{stored.get(p, 'none')}" for p in plan.partitions)
