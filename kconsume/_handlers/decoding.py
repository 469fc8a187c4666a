"""How the value of a record is turned into the type of the handler's first parameter.

The annotation is read once, when the handler is decorated. A type that cannot be decoded is refused then, with the fix.
The result is a `Decoding`. `json_decoder` reads types, `decode_callable` wraps the user's `decode=`.

Batches, `Record` and null values are not handled here: the caller has removed them from the annotation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kconsume._handlers.annotations import bare, text_of, without_none
from kconsume._handlers.decode_callable import check_decode, guarded, is_deserializer, with_context
from kconsume._handlers.json_decoder import json_decoder


@dataclasses.dataclass(frozen=True, slots=True)
class Decoding:
    """How the value of a record is decoded."""

    text: str
    """The type as a user writes it: `Placed | None`."""
    call: Callable[..., object] | None
    """Decodes a value that is not null. None if the value is passed on as it is.

    A decoder of kconsume raises what its library raises. The user's callable may have side effects, so it cannot be
    called again to explain a failure: its exception is turned into a `DecodeError` at once.
    """
    of_message: bool
    """True if `call` takes the message (`kconsume.records.Message`), False if it takes the value alone."""
    optional: bool
    """True if a null value (a tombstone) is passed on as None."""
    pure: bool = True
    """True for a decoder of kconsume, which can be called again to distinguish its failure from the handler's."""


def decoding_of(handler: str, parameter: str, hint: object, decode: Callable[..., object] | None = None) -> Decoding:
    """Return the decoding for a parameter of a handler. Raises InvalidHandler if there is none.

    Args:
        handler, parameter: their names, for errors.
        hint: the annotation.
        decode: the user's callable. With it the annotation only says whether None is accepted.
    """
    wanted, optional = without_none(hint)
    text = text_of(hint)
    if decode is not None:
        check_decode(handler, parameter, decode)
        of_message = is_deserializer(decode)
        call = with_context(decode, text) if of_message else guarded(decode, text)
        return Decoding(text, call, of_message=of_message, optional=optional, pure=False)
    if bare(wanted) is bytes:
        return Decoding(text, None, of_message=False, optional=optional)
    return Decoding(text, json_decoder(handler, parameter, wanted), of_message=False, optional=optional)
