"""kconsume: decorate a function, get a production Kafka consumer."""

__version__ = "0.1.0"

from kconsume.app import App
from kconsume.errors import ConfigurationError, DecodeError, Fenced, HandlerFailed, KconsumeError
from kconsume.records import Partition, Record
from kconsume.runtime.supervisor import Report

__all__ = [
    "App",
    "ConfigurationError",
    "DecodeError",
    "Fenced",
    "HandlerFailed",
    "KconsumeError",
    "Partition",
    "Record",
    "Report",
    "__version__",
]
