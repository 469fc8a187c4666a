"""Types of other packages: recognised by name, provided by a module that is imported only then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kconsume import App
from kconsume._handlers import type_providers
from kconsume._handlers.resources import Resource
from kconsume._handlers.type_providers import FrameType, TypeProvider, default_resource, frame_type, register_provider


class Frame:
    """A type that only the provider of this test knows."""


class Client: ...


def test_a_registered_provider_serves_handlers_of_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type_providers, "_providers", {})
    made = FrameType(Client, lambda client, table, messages: Frame())
    resource = Resource("client", Client, Client, {}, is_default=True)
    register_provider(
        __name__.partition(".")[0],
        TypeProvider(lambda hint: made if hint is Frame else None, lambda hint: resource if hint is Client else None),
    )
    app = App("127.0.0.1:1", group="shop")

    @app.consume("orders")
    def handle(frame: Frame, client: Client) -> None: ...

    assert app.registrations[0].binding.resources == {"frame": Client, "client": Client}
    assert app.declared.resources == {Client: resource}


def test_types_of_no_provider_are_not_recognised() -> None:
    for hint in (Frame, bytes, list[bytes], "DataFrame", None):
        assert frame_type(hint) is None
        assert default_resource(hint) is None


def test_the_provider_is_imported_with_the_first_annotation_of_its_package() -> None:
    program = (
        "import sys, kconsume\n"
        "app = kconsume.App('127.0.0.1:1', group='g', offsets='memory://')\n"
        "import pyspark.sql\n"
        "@app.consume('t')\n"
        "def handle(value: bytes) -> None: ...\n"
        "print(sorted(name for name in sys.modules if name.startswith('kconsume.spark')))\n"
        "@app.consume('u')\n"
        "def handle_frames(frame: pyspark.sql.DataFrame) -> None: ...\n"
        "print('kconsume.spark._sink.frame_provider' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
