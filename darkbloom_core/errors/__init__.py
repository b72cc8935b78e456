"""Every error that darkbloom raises, with the HTTP status it means; mapped to HTTP in one place.

::

    DarkbloomError                      500 internal_error
    ├── RequestError                    400 invalid_request_error
    │   ├── InvalidRequest              400 invalid_value
    │   ├── ContextLengthExceeded       400 context_length_exceeded
    │   ├── NeverFits                   400 request_too_large
    │   ├── Unauthorized                401 invalid_api_key
    │   ├── OriginNotAllowed            403 origin_not_allowed
    │   ├── ModelNotFound               404 model_not_found
    │   ├── RouteNotFound               404 route_not_found
    │   ├── MethodNotAllowed            405 method_not_allowed
    │   ├── BodyTooLarge                413 body_too_large
    │   └── RequestCancelled            499 cancelled
    ├── Unavailable                     503 unavailable, with Retry-After
    │   ├── QueueFull                   429 queue_full
    │   ├── RateLimitExceeded           429 rate_limit_exceeded
    │   ├── ConcurrencyLimitExceeded    429 concurrency_limit_exceeded
    │   ├── CapacityExhausted           503 capacity_exhausted
    │   │   ├── ModelDoesNotFit         503 model_does_not_fit
    │   │   ├── GrantTooSmall           503 grant_too_small
    │   │   └── NoSlotFree              503 no_slot_free
    │   ├── ModelNotReady               503 model_not_ready
    │   └── Draining                    503 draining
    ├── NotOffered                      501 not_implemented
    ├── GenerationFailed                500 generation_failed
    ├── DeadlineExceeded                504 deadline_exceeded
    └── SetupError                      exit code 2 of the command line
        ├── SettingsError
        ├── PluginError
        └── CheckpointError
            └── UnsupportedCheckpoint

A deterministic fault of a request is a ``RequestError`` and is never worth retrying;
an ``Unavailable`` can be retried after ``retry_after_seconds``.
"""

from darkbloom_core.errors._tree import (
    BodyTooLarge,
    CapacityExhausted,
    CheckpointError,
    ConcurrencyLimitExceeded,
    ContextLengthExceeded,
    DarkbloomError,
    DeadlineExceeded,
    Draining,
    GenerationFailed,
    GrantTooSmall,
    InvalidRequest,
    MethodNotAllowed,
    ModelDoesNotFit,
    ModelNotFound,
    ModelNotReady,
    NeverFits,
    NoSlotFree,
    NotOffered,
    OriginNotAllowed,
    PluginError,
    QueueFull,
    RateLimitExceeded,
    RequestCancelled,
    RequestError,
    RouteNotFound,
    SettingsError,
    SetupError,
    Unauthorized,
    Unavailable,
    UnsupportedCheckpoint,
)

__all__ = [
    "BodyTooLarge",
    "CapacityExhausted",
    "CheckpointError",
    "ConcurrencyLimitExceeded",
    "ContextLengthExceeded",
    "DarkbloomError",
    "DeadlineExceeded",
    "Draining",
    "GenerationFailed",
    "GrantTooSmall",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelDoesNotFit",
    "ModelNotFound",
    "ModelNotReady",
    "NeverFits",
    "NoSlotFree",
    "NotOffered",
    "OriginNotAllowed",
    "PluginError",
    "QueueFull",
    "RateLimitExceeded",
    "RequestCancelled",
    "RequestError",
    "RouteNotFound",
    "SettingsError",
    "SetupError",
    "Unauthorized",
    "Unavailable",
    "UnsupportedCheckpoint",
]
