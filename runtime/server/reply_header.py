"""Finds the header of a recorded reply; imports no torch, since a server for several models only forwards requests."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mycli.runtime.engine.replies.journal import ReplyJournal
from mycli.runtime.errors import UserError
from mycli.runtime.server.http.api_error import ApiError


def find_reply(journal: ReplyJournal | None, name: str) -> Mapping[str, Any]:
    """Return the header of the record of a reply. Raises ApiError."""
    with suppress(UserError, AttributeError):
        if journal is not None and (header := journal.header(name)).get("kind") == "server":
            return header
    message = (
        f"reply {name[:64]!r} is not recorded: records are kept for a day, unless the server was started without them"
    )
    raise ApiError(404, message, "reply_not_found")
