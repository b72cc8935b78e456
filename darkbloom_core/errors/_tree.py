"""The exception tree that the package's docstring draws."""


class DarkbloomError(Exception):
    """Base of all. ``status`` is the HTTP status, ``code`` the machine-readable cause."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(DarkbloomError):
    """The request itself is at fault; sending it again cannot help."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """``param`` names the offending field of the request, if it is one."""
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""

    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    """Prompt and requested output are longer than the model's context."""

    code = "context_length_exceeded"


class NeverFits(RequestError):
    """The request needs more memory than this machine could ever give it."""

    code = "request_too_large"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class OriginNotAllowed(RequestError):
    """A page in a browser asks, and nobody has said that it may."""

    status = 403
    code = "origin_not_allowed"


class ModelNotFound(RequestError):
    """No slot serves a model of this name."""

    status = 404
    code = "model_not_found"


class RouteNotFound(RequestError):
    """No such path."""

    status = 404
    code = "route_not_found"


class MethodNotAllowed(RequestError):
    """The path exists, but not for this HTTP method."""

    status = 405
    code = "method_not_allowed"


class BodyTooLarge(RequestError):
    """The body is over the configured limit."""

    status = 413
    code = "body_too_large"


class RequestCancelled(RequestError):
    """The caller went away or cancelled."""

    status = 499
    code = "cancelled"


class Unavailable(DarkbloomError):
    """Not now, but perhaps later."""

    status = 503
    code = "unavailable"

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueFull(Unavailable):
    """The bounded waiting queue is full."""

    status = 429
    code = "queue_full"


class RateLimitExceeded(Unavailable):
    """The API key has asked too often."""

    status = 429
    code = "rate_limit_exceeded"


class ConcurrencyLimitExceeded(Unavailable):
    """As many requests of the API key are being answered as may be at once."""

    status = 429
    code = "concurrency_limit_exceeded"


class CapacityExhausted(Unavailable):
    """Larger than the model's present share of memory."""

    code = "capacity_exhausted"


class ModelDoesNotFit(CapacityExhausted):
    """The memory that is free now does not hold the model's weights and what it needs to serve."""

    code = "model_does_not_fit"


class GrantTooSmall(CapacityExhausted):
    """Beside the models that are loaded, one of them would be left with too little KV memory."""

    code = "grant_too_small"


class NoSlotFree(CapacityExhausted):
    """As many models are loaded as may be, and none of them is idle."""

    code = "no_slot_free"


class ModelNotReady(Unavailable):
    """The model is loading, warming or recovering."""

    code = "model_not_ready"


class Draining(Unavailable):
    """The server is shutting down and takes nothing new."""

    code = "draining"


class NotOffered(DarkbloomError):
    """A part of the API that this server does not have."""

    status = 501
    code = "not_implemented"


class GenerationFailed(DarkbloomError):
    """A step of the engine raised; the sequences in it end with this."""

    code = "generation_failed"


class DeadlineExceeded(DarkbloomError):
    """The request made no progress for too long."""

    status = 504
    code = "deadline_exceeded"


class SetupError(DarkbloomError):
    """Something is wrong before any request: the command line exits with 2."""


class SettingsError(SetupError):
    """A setting is unknown, malformed or contradictory."""

    code = "settings_error"


class PluginError(SetupError):
    """A plugin cannot be loaded, and strict mode was asked for."""

    code = "plugin_error"


class CheckpointError(SetupError):
    """A checkpoint is missing, damaged or contradictory. The message names the file."""

    code = "checkpoint_error"


class UnsupportedCheckpoint(CheckpointError):
    """No installed family reads this checkpoint, or not this layout of it."""

    code = "unsupported_checkpoint"
