"""The pytest plugin, as people's own tests see it: each test here is a pytest run in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kconsume.testing import EmbeddedKafka

_ROOT = Path(__file__).parents[3]

APP = """
    from kconsume import App

    app = App("prod.invalid:9092", group="shop")
    handled = []

    @app.consume("orders")
    def reserve(order: str) -> None:
        handled.append(order)
"""


class Folder:
    """A person's tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.write("shop.py", APP)

    def write(self, name: str, source: str) -> None:
        (self._path / name).write_text(textwrap.dedent(source))

    def test(self, source: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run these tests with the plugin. Entry points are off, so that it is loaded once, installed or not."""
        self.write("test_shop.py", source)
        plugins = ["-p", "kconsume.testing.plugin"]
        return self.python("-m", "pytest", "-q", "-W", "error", *plugins, *arguments, **environment)

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fixed = {"PYTHONPATH": str(_ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._path,
            env={**fixed, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_each_test_has_an_embedded_kafka_of_its_own(folder: Folder) -> None:
    done = folder.test("""
        import pytest
        from kconsume.errors import EmbeddedBrokerError

        seen = []

        @pytest.mark.parametrize("turn", [1, 2])
        def test_topics(kconsume_embedded, turn):
            for before in seen:
                with pytest.raises(EmbeddedBrokerError):
                    before.bootstrap
            seen.append(kconsume_embedded)
            assert kconsume_embedded.topics() == {}
            kconsume_embedded.create_topic("orders", 2)
            assert kconsume_embedded.topics() == {"orders": 2}
            assert kconsume_embedded.bootstrap.startswith("127.0.0.1:")
    """)
    assert "2 passed" in done.stdout, done.stdout


def test_an_app_is_overridden_until_the_test_ends(folder: Folder) -> None:
    done = folder.test("""
        import shop

        def test_a_whole_run(kconsume_embedded, kconsume_override):
            kconsume_embedded.create_topic("orders", 1)
            app = kconsume_override(
                shop.app, brokers=kconsume_embedded.bootstrap, group="test", kafka={"session.timeout.ms": 2000}
            )
            assert app is shop.app
            app.send("orders", "one")
            assert app.catch_up(idle=0.1).handled == 1
            assert shop.handled == ["one"]

        def test_after():
            assert (shop.app.brokers, shop.app.group, shop.app.kafka) == ("prod.invalid:9092", "shop", {})
    """)
    assert "2 passed" in done.stdout, done.stdout


def test_a_real_kafka_is_taken_from_the_address_that_is_given_and_once_for_a_run(folder: Folder) -> None:
    with EmbeddedKafka() as stand_in:
        done = folder.test(
            """
            seen = set()

            def test_one(kconsume_kafka):
                assert kconsume_kafka.way == "address"
                seen.add(id(kconsume_kafka))

            def test_two(kconsume_kafka):
                seen.add(id(kconsume_kafka))
                assert len(seen) == 1
            """,
            KCONSUME_TEST_KAFKA=stand_in.bootstrap,
        )
    assert "2 passed" in done.stdout, done.stdout


def test_a_kafka_that_cannot_be_had_is_an_error_with_the_fix_and_no_skip(folder: Folder) -> None:
    folder.write(
        "conftest.py",
        """
        import kconsume.testing.services.choose as choose

        choose._ANSWER_SECONDS = 0.2
        """,
    )
    done = folder.test("def test_one(kconsume_kafka): ...", KCONSUME_TEST_KAFKA="127.0.0.1:1")
    assert done.returncode == 1
    assert "1 error" in done.stdout
    assert "skipped" not in done.stdout
    assert "give its address in KCONSUME_TEST_KAFKA" in done.stdout
    assert "Traceback" not in done.stdout


def test_the_fixtures_are_listed_with_what_they_are_for(folder: Folder) -> None:
    listed = folder.test("", "--fixtures").stdout
    assert "kconsume_embedded -- " in listed
    assert "An embedded Kafka of this test's own" in listed
    assert "kconsume_kafka [session scope] -- " in listed
    assert "kconsume_override -- " in listed


_ALONE = """
import sys
import {module}
print(sorted(name for name in sys.modules if name.split(".")[0] in {heavy}))
"""
_HEAVY = {"kconsume", "confluent_kafka", "msgspec", "asyncio", "sqlite3", "testcontainers", "pydantic", "docker"}


def brought_in_by(folder: Folder, module: str) -> set[str]:
    code = _ALONE.format(module=module, heavy=_HEAVY)
    done = folder.python("-c", code)
    assert done.returncode == 0, done.stderr
    names: list[str] = eval(done.stdout)
    return set(names)


def test_loading_the_plugin_brings_in_nothing_but_itself(folder: Folder) -> None:
    pytests_own = brought_in_by(folder, "pytest") - {"kconsume"}
    assert brought_in_by(folder, "kconsume.testing.plugin") - pytests_own == {
        "kconsume",
        "kconsume._lazy",
        "kconsume.testing",
        "kconsume.testing.plugin",
    }


def test_control_a_module_that_brings_in_more_is_noticed(folder: Folder) -> None:
    assert {"confluent_kafka", "kconsume.errors"} <= brought_in_by(folder, "kconsume._embedded.mock_cluster")


def test_the_testing_kit_is_imported_piece_by_piece(folder: Folder) -> None:
    assert "kconsume._embedded.mock_cluster" not in brought_in_by(folder, "kconsume.testing")
