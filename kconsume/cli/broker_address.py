"""Resolves the address of a cluster for a Kafka client. Does not start an embedded broker."""

from __future__ import annotations

from kconsume.errors import ConfigurationError

_EMBEDDED = "embedded://"


def connect_address(brokers: str) -> str:
    """The address for the client's `bootstrap.servers`.

    Args:
        brokers: `host:port,...`, which is returned as it is, or `embedded://NAME`, which must be running.
    """
    if not brokers.startswith(_EMBEDDED):
        return brokers
    from kconsume._embedded.address import resolve

    check_running(brokers)
    return resolve(brokers, [])


def check_running(brokers: str) -> None:
    """Raise `ConfigurationError` for an embedded broker that is not running: its records are lost with its memory."""
    if not brokers.startswith(_EMBEDDED):
        return
    from kconsume._embedded.named_broker import find

    name = brokers.removeprefix(_EMBEDDED)
    if not name:
        raise ConfigurationError(
            "the app uses embedded://, a broker inside the app's own process, and its records ended with this process: "
            "name the broker to share it, as in App('embedded://shop', ...)"
        )
    if find(name) is None:
        raise ConfigurationError(
            f"the embedded broker {name!r} is not running, and its records are lost: start it with "
            f"`kconsume broker {name}`, and produce the records again"
        )
