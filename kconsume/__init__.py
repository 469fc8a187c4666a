"""kconsume: decorate a function, get a production Kafka consumer."""

__version__ = "0.1.0"

from kconsume.app import App
from kconsume.batches import Batch, Batching
from kconsume.errors import BatchError, ConfigurationError, DecodeError, Fenced, HandlerFailed, KconsumeError
from kconsume.output import Outgoing, Sender
from kconsume.rate import Rate
from kconsume.records import Partition, Record
from kconsume.router import Router
from kconsume.runtime.supervisor import Report

__all__ = [
    "App",
    "Batch",
    "BatchError",
    "Batching",
    "ConfigurationError",
    "DecodeError",
    "Fenced",
    "HandlerFailed",
    "KconsumeError",
    "Outgoing",
    "Partition",
    "Rate",
    "Record",
    "Report",
    "Router",
    "Sender",
    "__version__",
]
