"""HTTP errors: a status and an object with message, type, param and code, in the form of each interface."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mycli.runtime.errors import UserError
from mycli.runtime.utils.sanitize import one_line

# What a client can do, by the code of a `UserError`. Codes of loading a model are missing: it is loaded before.
_REMEDIES: Mapping[str, str] = {
    "allow-special": "take the control token out of the text",
    "continue-text": "use POST /v1/completions to continue a text",
    "more-context": "shorten the prompt",
    "fewer-beams": "ask for fewer beams or tokens",
    "fewer-tokens-or-more-context": "ask for at most {tokens} tokens",
}
_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that fails: HTTP `status`, `code` for programs, `param` the field at fault; `details`: of Anthropic."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.details = details

    def fields(self) -> dict[str, Any]:
        """Return the error as an object, always with the first four fields."""
        kind = _TYPES.get(self.status, "api_error")
        details = {} if self.details is None else {"details": self.details}
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code, **details}

    def envelope(self, path: str, request_id: str = "") -> dict[str, Any]:
        """Return the response body in the form of the interface that `path` belongs to."""
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": self.fields(), "request_id": request_id or None}
        if path.startswith("/api/"):  # Ollama's
            return {"error": self.message}
        return {"error": self.fields()}


class ContextError(ApiError):
    """A prompt that does not fit the context, alone (`limit` None) or with `limit` tokens of a reply.

    Clients recognize this error by its sentence, so it is worded as OpenAI's, and for `/v1/messages` as Anthropic's.
    """

    def __init__(self, prompt: int, limit: int | None, context: int, *, param: str, room: int) -> None:
        # At least one token of a reply must fit, so a prompt alone asks for one more than it has.
        self._anthropic = f"prompt is too long: {prompt} tokens > {context} maximum"
        cause = f"your {param} resulted in {prompt} tokens"
        if limit is not None:
            self._anthropic = (
                f"input length and `max_tokens` exceed context limit: {prompt} + {limit} > {context}, "
                "decrease input length or `max_tokens` and try again"
            )
            cause = f"you requested {prompt + limit} tokens ({prompt} in the {param}, {limit} in the completion)"
        remedy = f"Please reduce the length of the {param}"
        if room > 0:
            remedy += f" or of the completion; at most {room} tokens fit"
        message = f"This model's maximum context length is {context} tokens. However, {cause}. {remedy}."
        super().__init__(400, message, "context_length_exceeded", param=param)

    def envelope(self, path: str, request_id: str = "") -> dict[str, Any]:
        body = super().envelope(path, request_id)
        if path.startswith("/v1/messages"):
            body["error"]["message"] = self._anthropic
        return body


def invalid_value(param: str, cause: str) -> ApiError:
    return ApiError(400, f"{param}: {cause}", "invalid_value", param=param)


def unsupported_parameter(param: str, cause: str) -> ApiError:
    return ApiError(400, f"{param}: {cause}", "unsupported_parameter", param=param)


def from_user_error(error: UserError, param: str | None = None) -> ApiError:
    """Convert an error caused by the request's content, with its remedy, to a status 400."""
    hint = _REMEDIES.get(error.code, "").format_map(error.data) if error.code else error.hint
    message = f"{error.message}; {hint}" if hint else error.message
    code = "context_length_exceeded" if "context" in error.code else "invalid_value"
    return ApiError(400, message, code, param=param)


@contextmanager
def as_api_errors(param: str | None = None) -> Iterator[None]:
    """Raise a `UserError` of the block as `from_user_error` converts it."""
    try:
        yield
    except UserError as error:
        raise from_user_error(error, param) from None


def response_not_found(name: str) -> ApiError:
    return ApiError(404, f"no response {name[:60]!r} is stored here", "response_not_found", param="response_id")


def internal_error() -> ApiError:
    # The cause goes to the log only: it may hold another client's data.
    return ApiError(500, "internal error", "internal_error")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", "shutting_down", headers={"retry-after": "10"})
