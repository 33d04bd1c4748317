"""Errors as clients of these protocols read them: a status and an object with message, type, param and code.

Knows what a remedy is called here. Does not know routes.
"""

from collections.abc import Mapping
from typing import Any

from mycli.runtime.errors import UserError
from mycli.runtime.utils.sanitize import one_line

# What a client can do about an error of the rooms below, by its code; those of loading a model cannot come here.
_REMEDIES: Mapping[str, str] = {
    "allow-special": "take the control token out of the text",
    "continue-text": "POST /v1/completions continues a text",
    "more-context": "shorten the prompt",
    "fewer-tokens-or-more-context": "ask for at most {tokens} tokens",
}
_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is not answered: HTTP `status`, `code` for programs, `param` naming the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def fields(self) -> dict[str, Any]:
        """The error as an object; all four fields, whatever is known."""
        kind = _TYPES.get(self.status, "api_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def envelope(self, path: str) -> dict[str, Any]:
        """The body of the answer, in the form of the protocol that `path` belongs to."""
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": self.fields()}
        return {"error": self.fields()}


def from_user_error(error: UserError, param: str | None = None) -> ApiError:
    """A failure of the rooms below while a request was read, with its remedy: the request asks for what cannot be."""
    hint = _REMEDIES.get(error.code, "").format_map(error.data) if error.code else error.hint
    message = f"{error.message}; {hint}" if hint else error.message
    code = "context_length_exceeded" if "context" in error.code else "invalid_value"
    return ApiError(400, message, code, param=param)


def internal_error() -> ApiError:
    """What should not have happened; its cause is for the log, not for a stranger."""
    return ApiError(500, "internal error", "internal_error")
