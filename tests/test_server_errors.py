"""Every leaf of the exception tree has one answer."""

import pytest
from starlette.exceptions import HTTPException

from darkbloom_core import errors
from darkbloom_core.server._errors import MESSAGE_CHARACTERS, error_answer

TABLE = {
    "InvalidRequest": (400, "invalid_request_error", "invalid_value"),
    "ContextLengthExceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "NeverFits": (400, "invalid_request_error", "request_too_large"),
    "Unauthorized": (401, "authentication_error", "invalid_api_key"),
    "OriginNotAllowed": (403, "permission_error", "origin_not_allowed"),
    "ModelNotFound": (404, "invalid_request_error", "model_not_found"),
    "RouteNotFound": (404, "invalid_request_error", "route_not_found"),
    "MethodNotAllowed": (405, "invalid_request_error", "method_not_allowed"),
    "BodyTooLarge": (413, "invalid_request_error", "body_too_large"),
    "RequestCancelled": (499, "invalid_request_error", "cancelled"),
    "QueueFull": (429, "rate_limit_error", "queue_full"),
    "RateLimitExceeded": (429, "rate_limit_error", "rate_limit_exceeded"),
    "ConcurrencyLimitExceeded": (429, "rate_limit_error", "concurrency_limit_exceeded"),
    "CapacityExhausted": (503, "service_unavailable_error", "capacity_exhausted"),
    "ModelDoesNotFit": (503, "service_unavailable_error", "model_does_not_fit"),
    "GrantTooSmall": (503, "service_unavailable_error", "grant_too_small"),
    "NoSlotFree": (503, "service_unavailable_error", "no_slot_free"),
    "ModelNotReady": (503, "service_unavailable_error", "model_not_ready"),
    "Draining": (503, "service_unavailable_error", "draining"),
    "NotOffered": (501, "server_error", "not_implemented"),
    "GenerationFailed": (500, "server_error", "generation_failed"),
    "DeadlineExceeded": (504, "server_error", "deadline_exceeded"),
}


def leaves(kind=errors.DarkbloomError):
    children = kind.__subclasses__()
    return [leaf for child in children for leaf in leaves(child)] if children else [kind]


@pytest.mark.parametrize("kind", leaves(), ids=lambda kind: kind.__name__)
def test_every_leaf_has_its_status_type_and_code(kind) -> None:
    answer = error_answer(kind("what happened"))
    if issubclass(kind, errors.SetupError):
        assert (answer.status, answer.code) == (500, "internal_error")
        assert "what happened" not in answer.message
        return
    assert (answer.status, answer.type, answer.code) == TABLE[kind.__name__]
    assert answer.body() == {
        "error": {"message": "what happened", "type": answer.type, "param": None, "code": answer.code}
    }


def test_only_what_can_be_retried_says_when() -> None:
    assert error_answer(errors.QueueFull("full", retry_after_seconds=7)).headers == {"retry-after": "7"}
    assert error_answer(errors.InvalidRequest("bad", param="n")).headers == {}
    assert error_answer(errors.NotOffered("no")).headers == {"x-should-retry": "false"}
    assert error_answer(errors.InvalidRequest("bad", param="n")).param == "n"


def test_an_unforeseen_error_shows_nothing_of_itself() -> None:
    answer = error_answer(ValueError("the prompt was: my secret"))
    assert (answer.status, answer.type, answer.code) == (500, "server_error", "internal_error")
    assert "secret" not in answer.message


def test_messages_are_bounded() -> None:
    assert len(error_answer(errors.InvalidRequest("x" * 100_000)).message) == MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (401, "authentication_error", "invalid_api_key"),
        (404, "invalid_request_error", "route_not_found"),
        (405, "invalid_request_error", "method_not_allowed"),
        (413, "invalid_request_error", "body_too_large"),
        (418, "invalid_request_error", "invalid_value"),
        (502, "server_error", "internal_error"),
    ],
)
def test_errors_by_number_get_the_same_shape(status, kind, code) -> None:
    answer = error_answer(HTTPException(status, "a reason", {"allow": "GET"}))
    assert (answer.status, answer.type, answer.code, answer.message) == (status, kind, code, "a reason")
    assert answer.headers == {"allow": "GET", **({"www-authenticate": "Bearer"} if status == 401 else {})}
