"""What the Kafka client is told: our defaults, the person's wishes, what is refused, and what is never shown."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from kconsume._config.client_settings import (
    DEFAULTS,
    FORBIDDEN,
    MASK,
    ClientValue,
    check_overrides,
    client_settings,
    connection_settings,
    masked,
    masked_address,
)
from kconsume.errors import ConfigurationError


class TestClientSettings:
    def test_ours_come_first_and_the_person_s_over_them(self) -> None:
        settings = client_settings("host:9092", "shop", {"fetch.wait.max.ms": 7, "client.id": "mine"})
        assert settings["fetch.wait.max.ms"] == 7
        assert settings["client.id"] == "mine"
        assert settings["fetch.queue.backoff.ms"] == 5

    def test_what_the_promises_need_cannot_be_overridden(self) -> None:
        wishes: dict[str, ClientValue] = {
            "enable.auto.commit": True,
            "enable.auto.offset.store": True,
            "auto.offset.reset": "latest",
            "group.id": "other",
            "bootstrap.servers": "elsewhere",
        }
        settings = client_settings("host:9092", "shop", wishes)
        assert settings["enable.auto.commit"] is False
        assert settings["enable.auto.offset.store"] is False
        assert settings["auto.offset.reset"] == "error"
        assert settings["group.id"] == "shop"
        assert settings["bootstrap.servers"] == "host:9092"

    def test_the_client_knows_every_one_of_them(self) -> None:
        Consumer(client_settings("127.0.0.1:1", "shop", {"log_level": 0})).close()

    def test_ends_are_reported(self) -> None:
        """By them an offset passes what follows the last record, and `catch_up` knows when it is done."""
        assert client_settings("h:1", "g", {})["enable.partition.eof"] is True

    def test_an_embedded_broker_gets_short_timeouts_unless_the_person_said_otherwise(self) -> None:
        assert client_settings("h:1", "g", {}, embedded=True)["session.timeout.ms"] == 2000
        assert client_settings("h:1", "g", {"session.timeout.ms": 9000}, embedded=True)["session.timeout.ms"] == 9000

    @pytest.mark.parametrize(
        ("said", "heartbeat"),
        [
            ({}, 3000),
            ({"session.timeout.ms": 6000}, 2000),
            ({"session.timeout.ms": "6000"}, 2000),
            ({"session.timeout.ms": 9000}, 3000),
            ({"session.timeout.ms": 60_000}, 3000),
            ({"session.timeout.ms": 2}, 1),
            ({"session.timeout.ms": 6000, "heartbeat.interval.ms": 2500}, 2500),
            ({"session.timeout.ms": "soon"}, 3000),
        ],
    )
    def test_a_short_session_has_three_heartbeats_unless_the_user_said_otherwise(
        self, said: dict[str, ClientValue], heartbeat: int
    ) -> None:
        assert client_settings("h:1", "g", said)["heartbeat.interval.ms"] == heartbeat

    def test_a_heartbeat_that_the_broker_decides_is_not_said(self) -> None:
        assert "heartbeat.interval.ms" not in client_settings("h:1", "g", {"group.protocol": "consumer"})

    def test_the_caller_s_mapping_is_left_alone(self) -> None:
        wishes: dict[str, ClientValue] = {"fetch.wait.max.ms": 7}
        client_settings("h:1", "g", wishes)
        assert wishes == {"fetch.wait.max.ms": 7}

    def test_each_default_has_a_reason_and_is_named_once(self) -> None:
        assert all(default.why for default in DEFAULTS)
        assert len({default.name for default in DEFAULTS}) == len(DEFAULTS)

    def test_no_default_is_one_of_those_refused(self) -> None:
        assert not {default.name for default in DEFAULTS} & FORBIDDEN.keys()


class TestRefused:
    @pytest.mark.parametrize("name", sorted(FORBIDDEN))
    def test_what_would_break_a_promise_is_refused_by_name_and_with_the_reason(self, name: str) -> None:
        with pytest.raises(ConfigurationError) as refused:
            check_overrides({"fetch.wait.max.ms": 7, name: "anything"})
        assert repr(name) in str(refused.value)
        assert FORBIDDEN[name] in str(refused.value)

    @pytest.mark.parametrize(
        "name", ["enable.auto.commit", "enable.auto.offset.store", "auto.offset.reset", "group.id"]
    )
    def test_the_four_that_the_design_names_are_among_them(self, name: str) -> None:
        assert name in FORBIDDEN


class TestConnectionSettings:
    @pytest.mark.parametrize(
        "name",
        [
            "security.protocol",
            "sasl.mechanisms",
            "sasl.username",
            "sasl.password",
            "sasl.oauthbearer.method",
            "ssl.ca.location",
            "ssl.endpoint.identification.algorithm",
            "socket.timeout.ms",
            "socket.connection.setup.timeout.ms",
            "broker.address.family",
            "api.version.request",
            "reconnect.backoff.ms",
            "client.dns.lookup",
            "enable.ssl.certificate.verification",
            "enable.sasl.oauthbearer.unsecure.jwt",
            "https.ca.location",
        ],
    )
    def test_what_says_how_to_reach_the_cluster_reaches_every_client(self, name: str) -> None:
        """Else the consumer connects, and the questions to the cluster fail."""
        assert connection_settings("host:9092", {name: "x"})[name] == "x"

    def test_what_only_a_consumer_knows_does_no_harm_to_the_others(self) -> None:
        wishes: dict[str, ClientValue] = {default.name: default.value for default in DEFAULTS}
        AdminClient(connection_settings("127.0.0.1:1", {**wishes, "group.instance.id": "a", "fetch.min.bytes": 1}))

    def test_the_address_is_the_app_s(self) -> None:
        assert connection_settings("host:9092", {})["bootstrap.servers"] == "host:9092"

    def test_the_caller_s_mapping_is_left_alone(self) -> None:
        wishes: dict[str, ClientValue] = {"socket.timeout.ms": 7}
        connection_settings("host:9092", wishes)
        assert wishes == {"socket.timeout.ms": 7}


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        [
            "sasl.password",
            "ssl.key.password",
            "ssl.keystore.password",
            "ssl.key.pem",
            "sasl.oauthbearer.client.secret",
            "sasl.oauthbearer.config",
            "sasl.oauthbearer.assertion.private.key.passphrase",
            "sasl.oauthbearer.assertion.private.key.pem",
            "SASL.PASSWORD",
        ],
    )
    def test_a_secret_is_covered(self, name: str) -> None:
        assert masked({name: "hunter2", "security.protocol": "SASL_SSL"}) == {
            name: MASK,
            "security.protocol": "SASL_SSL",
        }

    @pytest.mark.parametrize(
        ("address", "shown"),
        [
            ("postgresql://shop:hunter2@db:5432/shop", f"postgresql://shop:{MASK}@db:5432/shop"),
            ("redis://:hunter2@cache/0", f"redis://:{MASK}@cache/0"),
            ("postgresql://shop@db/shop", "postgresql://shop@db/shop"),
            ("postgresql://db/shop", "postgresql://db/shop"),
            ("sqlite:////data/a@b.db", "sqlite:////data/a@b.db"),
            ("memory://", "memory://"),
        ],
    )
    def test_an_address_is_shown_without_its_password_and_else_as_it_is(self, address: str, shown: str) -> None:
        assert masked_address(address) == shown

    @pytest.mark.parametrize(
        "address",
        [
            "postgresql://shop:hunter2@home@db/shop",
            "postgresql://shop:hunter2/home@db/shop",
            "postgresql://shop:x@hunter2@db/shop",
            "postgresql://db/shop?user=shop&password=hunter2",
            "redis://cache/0?password=hunter2&db=1",
            "postgresql://db/shop?sslmode=require&sslpassword=hunter2",
        ],
    )
    def test_no_way_to_write_a_password_into_an_address_shows_it(self, address: str) -> None:
        assert "hunter2" not in masked_address(address)
