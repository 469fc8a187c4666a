"""The functions of librdkafka's mock cluster, called through the client's own shared library.

Every function is declared with its types. Without the types, ctypes would cut a pointer to 32 bits.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import confluent_kafka

from kconsume._embedded.controls import Argument
from kconsume.errors import EmbeddedBrokerError

_pointer, _text, _int = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_int16, _int32, _int64, _size = ctypes.c_int16, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
_CType: TypeAlias = type["ctypes._CDataType"]

_LIFECYCLE: Mapping[str, tuple[_CType | None, tuple[_CType, ...]]] = {
    "conf_new": (_pointer, ()),
    "conf_set": (_int, (_pointer, _text, _text, _text, _size)),
    "conf_destroy": (None, (_pointer,)),
    "new": (_pointer, (_int, _pointer, _text, _size)),
    "destroy": (None, (_pointer,)),
    "mock_cluster_new": (_pointer, (_pointer, _int)),
    "mock_cluster_destroy": (None, (_pointer,)),
    "mock_cluster_bootstraps": (_text, (_pointer,)),
    "mock_start_request_tracking": (None, (_pointer,)),
    "mock_get_requests": (_pointer, (_pointer, ctypes.POINTER(_size))),
    "mock_request_destroy_array": (None, (_pointer, _size)),
    "mock_clear_requests": (None, (_pointer,)),
}

CONTROLS: Mapping[str, tuple[_CType | None, tuple[_CType, ...]]] = {
    "topic_create": (_int, (_text, _int, _int)),
    "topic_delete": (_int, (_text,)),
    "partition_set_leader": (_int, (_text, _int32, _int32)),
    "partition_delete_records": (_int, (_text, _int32, _int64)),
    "push_request_errors_array": (None, (_int16, _size, ctypes.POINTER(_int))),
    "clear_request_errors": (None, (_int16,)),
    "broker_set_down": (_int, (_int32,)),
    "broker_set_up": (_int, (_int32,)),
    "broker_set_rtt": (_int, (_int32, _int)),
    "coordinator_set": (_int, (_text, _text, _int32)),
    "group_initial_rebalance_delay_ms": (None, (_int32,)),
    "set_group_consumer_heartbeat_interval_ms": (None, (_int,)),
    "set_controller_id": (None, (_int32,)),
}
"""The functions for `KafkaControls.control`: the name after `rd_kafka_mock_`, the type of the result, and the types of
the arguments after the cluster."""


def c_arguments(arguments: Sequence[Argument]) -> Iterator[object]:
    """Yield arguments as C takes them. A sequence becomes its length and an array."""
    for argument in arguments:
        if isinstance(argument, str):
            yield argument.encode()
        elif isinstance(argument, int):
            yield argument
        else:
            yield len(argument)
            yield (_int * len(argument))(*argument)


def control_function(function: str) -> Callable[..., int | None]:
    """Return the C function of a control, whose first argument is the cluster.

    Args:
        function: one of `CONTROLS`.
    """
    if function not in CONTROLS:
        raise EmbeddedBrokerError(
            f"{function!r} is not a function of the embedded broker: use one of {', '.join(CONTROLS)}"
        )
    result, arguments = CONTROLS[function]
    return _typed(librdkafka(), f"mock_{function}", result, (_pointer, *arguments))


@functools.cache
def librdkafka() -> ctypes.CDLL:
    """Return the library that confluent-kafka uses. Raises EmbeddedBrokerError if it cannot be loaded."""
    path = _find_librdkafka()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise EmbeddedBrokerError(f"{path} cannot be loaded ({error}): reinstall confluent-kafka") from error
    for function, (result, arguments) in _LIFECYCLE.items():
        _typed(library, function, result, arguments)
    return library


def new_client() -> int:
    """Return the handle of a new client, to which a mock cluster can be added."""
    library, reason = librdkafka(), ctypes.create_string_buffer(512)
    settings = library.rd_kafka_conf_new()
    # Errors only: the client has no bootstrap.servers, and would log a warning about that.
    library.rd_kafka_conf_set(settings, b"log_level", b"3", reason, len(reason))
    client: int | None = library.rd_kafka_new(0, settings, reason, len(reason))
    if not client:
        library.rd_kafka_conf_destroy(settings)
        raise EmbeddedBrokerError(f"librdkafka could not start: {reason.value.decode(errors='replace')}")
    return client


def _typed(
    library: ctypes.CDLL, function: str, result: _CType | None, arguments: tuple[_CType, ...]
) -> Callable[..., int | None]:
    try:
        pointer = getattr(library, f"rd_kafka_{function}")
    except AttributeError:
        raise EmbeddedBrokerError(
            f"librdkafka {confluent_kafka.libversion()[0]} has no rd_kafka_{function}: "
            "install confluent-kafka 2.16 or later"
        ) from None
    pointer.restype, pointer.argtypes = result, arguments
    return cast("Callable[..., int | None]", pointer)


def _find_librdkafka() -> str:
    package = Path(confluent_kafka.__file__).parent
    in_wheel = [
        *package.with_name("confluent_kafka.libs").glob("librdkafka*.so*"),  # Linux
        *package.joinpath(".dylibs").glob("librdkafka*.dylib"),  # macOS
    ]
    found = str(in_wheel[0]) if in_wheel else ctypes.util.find_library("rdkafka")
    if found is None:
        raise EmbeddedBrokerError(
            f"there is no librdkafka beside {package}, and none in the system's library path: "
            "install confluent-kafka from a wheel (pip install --only-binary :all: confluent-kafka)"
        )
    return found
