"""What becomes of a record whose handler failed."""

from __future__ import annotations

import pytest

from kconsume import DecodeError
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import Policy, Verdict

ERRORS = [LookupError("x"), DecodeError("x"), KeyboardInterrupt(), SystemExit(1)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_by_default_a_failure_stops(error: BaseException) -> None:
    assert Policy().verdict(error) is Verdict.STOP


@pytest.mark.parametrize("error", ERRORS[:2], ids=lambda error: type(error).__name__)
def test_a_record_is_skipped_only_when_a_person_asked_for_it(error: BaseException) -> None:
    assert Policy("skip").verdict(error) is Verdict.SKIP


@pytest.mark.parametrize("error", ERRORS[2:], ids=lambda error: type(error).__name__)
def test_a_handler_that_ends_the_process_is_not_skipped_over(error: BaseException) -> None:
    """`sys.exit()` in a handler says stop, and not that the record is bad."""
    assert Policy("skip").verdict(error) is Verdict.STOP


@pytest.mark.parametrize("unknown", ["ignore", "STOP", "", None, True])
def test_an_unknown_choice_is_refused_with_those_there_are(unknown: object) -> None:
    with pytest.raises(
        ConfigurationError, match=r"on_error=.* is unknown: choose 'stop', 'hold', 'skip' or DeadLetter"
    ):
        Policy(unknown)  # type: ignore[arg-type]


def test_a_policy_says_in_words_what_it_does() -> None:
    assert "stops the process; the offset does not pass the record" in str(Policy("stop"))
    assert "skipped" in str(Policy("skip"))
    assert "holds its partition; the offset does not pass the record" in str(Policy("hold"))
