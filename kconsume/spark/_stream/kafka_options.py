"""The options of Spark's Kafka source, from an app's own settings.

The source is a Java client. Properties of librdkafka for the connection are translated to properties of the Java
client. Properties that only tune librdkafka are left out. A property for the connection that has no translation is
refused, because the stream would connect in another way than the app.
"""

from __future__ import annotations

from collections.abc import Mapping

from kconsume._config.client_settings import ClientValue
from kconsume.errors import ConfigurationError

# Spark's defaults fetch 1 MB a partition and 500 records a poll: with these values the same source reads 1.4 times as
# fast (measured). After each poll the source asks for the beginning and the end of the log, on the same connection. In
# each batch that reaches the end of a log, this request waits behind the next fetch, which the broker holds for
# fetch.max.wait.ms (500 by default). The wait gains nothing, because the source polls only for offsets that exist.
FETCH: Mapping[str, str] = {
    "kafka.max.partition.fetch.bytes": str(8 * 1024 * 1024),
    "kafka.fetch.max.bytes": str(64 * 1024 * 1024),
    "kafka.max.poll.records": "20000",
    "kafka.fetch.max.wait.ms": "20",
}
PROMISED: Mapping[str, str] = {"failOnDataLoss": "true", "includeHeaders": "true"}

_SAME = (
    "security.protocol",
    "client.id",
    "client.rack",
    "isolation.level",
    "check.crcs",
    "ssl.endpoint.identification.algorithm",
)
_RENAMED = {"sasl.mechanisms": "sasl.mechanism", "sasl.mechanism": "sasl.mechanism"}
_LOGINS = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_CONNECTING = ("sasl.", "ssl.", "security.", "enable.ssl", "oauth", "https.")


def source_options(brokers: str, kafka: Mapping[str, ClientValue], more: Mapping[str, str]) -> dict[str, str]:
    """All options except the topics and the offsets.

    Args:
        more: the user's options; they replace the others.
    """
    options = {
        **FETCH,
        **PROMISED,
        "kafka.isolation.level": "read_committed",
        **_connection(kafka, more),
        "kafka.bootstrap.servers": brokers,
    }
    lowered = {name.lower() for name in more}
    return {**{name: value for name, value in options.items() if name.lower() not in lowered}, **more}


def _connection(kafka: Mapping[str, ClientValue], more: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    login = {name: kafka[name] for name in ("sasl.username", "sasl.password") if name in kafka}
    for name, value in kafka.items():
        if name in login:
            continue
        if name in _SAME or name in _RENAMED:
            options[f"kafka.{_RENAMED.get(name, name)}"] = str(value)
        elif name == "ssl.ca.location":
            options |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": str(value)}
        elif name.startswith(_CONNECTING) and not any(each.startswith("kafka.ssl.keystore") for each in more):
            raise ConfigurationError(
                f"kafka={{{name!r}: …}} says how to connect, and Spark's Kafka source is a Java client with other "
                f"properties: give these too, as stream(…, options={{'kafka.ssl.keystore.location': …}})"
            )
    if login and "kafka.sasl.jaas.config" not in more:
        mechanism = options.get("kafka.sasl.mechanism", "PLAIN").upper()
        if mechanism not in _LOGINS or len(login) < 2:
            raise ConfigurationError(
                f"sasl.mechanisms={mechanism} cannot be configured for Spark's Kafka source from sasl.username and "
                f"sasl.password: give stream(…, options={{'kafka.sasl.jaas.config': …}})"
            )
        quoted = {name: str(value).replace("\\", "\\\\").replace('"', '\\"') for name, value in login.items()}
        options["kafka.sasl.jaas.config"] = (
            f'{_LOGINS[mechanism]} required username="{quoted["sasl.username"]}" password="{quoted["sasl.password"]}";'
        )
    return options
