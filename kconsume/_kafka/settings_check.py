"""Lets the Kafka client check a configuration. Connects to no broker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException

from kconsume._config.client_settings import ClientValue


class SettingsVerdict(NamedTuple):
    """The messages of the client, which may contain secrets of the configuration."""

    refused: str | None = None
    """Why the client refuses the configuration; None if the client accepts it."""
    warnings: tuple[str, ...] = ()


def check_settings(settings: Mapping[str, ClientValue]) -> SettingsVerdict:
    """Make a consumer with these settings, without an address, and close it again."""
    heard = _ConfigurationWarnings()
    logger = logging.Logger("kconsume.check")
    logger.addHandler(heard)
    alone = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    try:
        consumer = Consumer(alone, logger=logger)
    except KafkaException as error:
        return SettingsVerdict(error.args[0].str())
    except (TypeError, ValueError) as error:
        return SettingsVerdict(str(error))
    consumer.poll(0)  # the client passes its log lines on while it is polled
    consumer.close()
    return SettingsVerdict(warnings=tuple(heard.warnings))


class _ConfigurationWarnings(logging.Handler):
    """Collects what the client says about configuration: `CONFWARN [rdkafka#consumer-1] [thrd:app]: …`."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("CONFWARN"):
            self.warnings.append(text.partition("]: ")[2])
