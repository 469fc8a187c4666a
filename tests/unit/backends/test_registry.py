"""From an address to a store: ours by their scheme, others by their entry point, none with its password shown."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kconsume.backends import (
    FencedStore,
    KafkaStore,
    MemoryStore,
    OffsetStore,
    SqliteStore,
    TransactionalStore,
    registry,
)
from kconsume.backends import open_store as open_store_exported
from kconsume.backends.capabilities import capabilities_of
from kconsume.backends.registry import open_store, scheme_of
from kconsume.errors import ConfigurationError, KconsumeError, MissingExtra, UnknownStore


class Shelf(MemoryStore):
    """A third party's store."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address


class NamedDistribution(Distribution):
    """An installed package, of which only the name is asked."""

    @property
    def name(self) -> str:
        return "kconsume-shelf"

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


Install = Callable[[str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package that offers `shelf://` at this place."""

    def put(value: str) -> None:
        entry = EntryPoint("shelf", value, registry.ENTRY_POINTS)
        vars(entry).update(dist=NamedDistribution())

        def entry_points(*, group: str, name: str) -> EntryPoints:
            assert group == "kconsume.stores"
            return EntryPoints([entry]).select(name=name)

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return put


class TestOurOwn:
    @pytest.mark.parametrize(
        ("address", "kind"),
        [("kafka://", KafkaStore), ("memory://", MemoryStore), ("sqlite:///shop.db", SqliteStore)],
    )
    def test_the_scheme_says_which_store(self, address: str, kind: type[OffsetStore]) -> None:
        store = open_store(address)
        assert type(store) is kind
        assert store.address == address

    def test_opening_one_opens_no_file(self, tmp_path: Path) -> None:
        open_store(f"sqlite:///{tmp_path}/shop.db")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("address", "path"), [("sqlite:///data/shop.db", "data/shop.db"), ("sqlite:////data/shop.db", "/data/shop.db")]
    )
    def test_three_slashes_are_relative_and_four_absolute(self, address: str, path: str) -> None:
        store = open_store(address)
        assert isinstance(store, SqliteStore)
        assert store.path == Path(path)
        assert store.address == address

    @pytest.mark.parametrize("address", ["sqlite://", "sqlite:///", "sqlite://shop.db", "sqlite:///:memory:"])
    def test_a_file_must_be_named(self, address: str) -> None:
        with pytest.raises(ConfigurationError, match=r"sqlite:///relative\.db or sqlite:////absolute\.db"):
            open_store(address)

    def test_each_is_of_the_level_that_it_says(self) -> None:
        kafka, memory, sqlite = KafkaStore("127.0.0.1:1"), MemoryStore(), SqliteStore("shop.db")
        assert isinstance(kafka, OffsetStore)
        assert not isinstance(kafka, FencedStore)
        assert isinstance(memory, FencedStore)
        assert not isinstance(memory, TransactionalStore)
        assert isinstance(sqlite, TransactionalStore)

    def test_only_a_transactional_store_has_a_type_to_ask_for(self) -> None:
        for address in ("kafka://", "memory://"):
            offers = capabilities_of(open_store(address))
            assert (offers.connection_types, offers.async_connection_types) == ((), None)
        offers = capabilities_of(open_store("sqlite:///shop.db"))
        assert (offers.connection_types, offers.async_connection_types) == (SqliteStore.connection_types, None)

    def test_the_exported_function_is_this_one(self) -> None:
        assert open_store_exported is open_store

    def test_a_host_that_would_be_ignored_is_refused(self) -> None:
        """A person who writes another cluster's address believes that the offsets are there."""
        with pytest.raises(ConfigurationError, match="kafka://"):
            open_store("kafka://other-cluster:9092")


class TestUnknown:
    def test_a_store_nobody_offers_is_answered_with_those_there_are(self) -> None:
        with pytest.raises(UnknownStore) as unknown:
            open_store("mongodb://db/shop")
        assert "mongodb://db/shop" in str(unknown.value)
        offered = "kafka://, postgresql://host/database, sqlite:///file.db, redis://host:6379/0 or memory://"
        assert offered in str(unknown.value)
        assert "install a package that offers 'mongodb'" in str(unknown.value)

    @pytest.mark.parametrize("address", ["", "shop.db", "sqlite:shop.db", "/data/shop.db"])
    def test_what_is_not_an_address_is_answered_with_examples(self, address: str) -> None:
        with pytest.raises(UnknownStore, match=r"is not an address: write kafka://, postgresql://host/database"):
            scheme_of(address)

    @pytest.mark.parametrize(
        "address",
        [
            "mongodb://shop:hunter2@db/shop",
            "sqlite://shop:hunter2@db/shop",
            "postgresql:/shop:hunter2@db/shop",
            "shop:hunter2@db/shop",
            "host=db user=shop password=hunter2",
            "mongodb://db/shop?password=hunter2",
        ],
    )
    def test_no_error_shows_a_password(self, address: str) -> None:
        with pytest.raises(KconsumeError) as refused:
            open_store(address)
        assert "hunter2" not in str(refused.value)


class TestThirdParty:
    def test_its_entry_point_is_called_with_the_address(self, install: Install) -> None:
        install(f"{__name__}:Shelf")
        store = open_store("shelf://left/3")
        assert type(store).__name__ == "Shelf"
        assert store.address == "shelf://left/3"

    def test_another_scheme_is_still_unknown(self, install: Install) -> None:
        install(f"{__name__}:Shelf")
        with pytest.raises(UnknownStore, match="drawer"):
            open_store("drawer://left")

    def test_a_package_it_needs_that_is_missing_is_named_with_the_extra_to_install(self, install: Install) -> None:
        install("no_such_driver.store:Store [driver]")
        with pytest.raises(MissingExtra) as missing:
            open_store("shelf://left")
        assert "the store shelf:// needs no_such_driver" in str(missing.value)
        assert "pip install 'kconsume-shelf[driver]'" in str(missing.value)
        assert isinstance(missing.value.__cause__, ImportError)

    def test_without_an_extra_the_package_itself_is_named(self, install: Install) -> None:
        install("no_such_driver.store:Store")
        with pytest.raises(MissingExtra, match="pip install 'kconsume-shelf'"):
            open_store("shelf://left")

    def test_it_is_imported_only_when_its_scheme_is_used(self, install: Install) -> None:
        install("no_such_driver.store:Store")
        assert isinstance(open_store("memory://"), MemoryStore)
