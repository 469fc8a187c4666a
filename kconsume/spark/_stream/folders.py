"""Checkpoint folders: on this machine, or on a file system that Hadoop reaches through the driver's JVM."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from kconsume.errors import ConfigurationError
from kconsume.spark.jvm import hadoop_configuration, java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Folder(Protocol):
    """A folder on any file system. Paths are relative to it."""

    def read(self, path: str) -> str | None:
        """The text of a file; None if it does not exist."""
        ...

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; empty if the folder does not exist."""
        ...

    def write(self, path: str, text: str) -> None:
        """Make a file, as a whole or not at all. Processes that make the same file at once write the same text."""
        ...


class LocalFolder:
    """A folder on this machine. Each batch reads the folder, and a read through the JVM is a hundred times slower."""

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
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.rename(file)


class HadoopFolder:
    """A folder on a file system that Hadoop supports, reached through the driver's JVM."""

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
        temporary = self._path_of(file.getParent(), f".{file.getName()}.{uuid.uuid4().hex}")
        opened = self._files.create(temporary, False)
        try:
            opened.write(text.encode())
        finally:
            opened.close()
        if not self._files.rename(temporary, file):  # as on HDFS, where a rename does not replace an existing file
            self._files.delete(temporary, False)
            if not self._files.exists(file):
                raise ConfigurationError(
                    f"Hadoop could not rename {temporary.toString()} to {file.toString()}: give the Spark session the "
                    f"right to write there, or leave checkpoint= out: the offsets are in the store"
                )

    def _path(self, path: str) -> Any:
        return self._path_of(self._root, path) if path else self._root  # Hadoop has no empty path


def qualified_path(spark: SparkSession, folder: str) -> str:
    """The folder with its file system, as Spark understands it: a path without a scheme is on `fs.defaultFS`.

    Raises `ConfigurationError` if this session cannot reach the folder.
    """
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


def open_folder(spark: SparkSession, root: str) -> Folder:
    """The folder at `root`: a path with its file system, as `qualified_path` and Spark return it."""
    if root.startswith("file:/"):
        return LocalFolder("/" + root.removeprefix("file:").lstrip("/"))
    return HadoopFolder(spark, root)


def _file_system(spark: SparkSession, path: Any) -> Any:
    return path.getFileSystem(hadoop_configuration(spark))
