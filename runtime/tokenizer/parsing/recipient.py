"""Reads the recipient with which a reply begins where the prompt has written the mark before it (Functionary 3.2)."""

import re

from mycli.runtime.tokenizer.parsing.tool_formats import EVERYONE

_NAME = r"[\w.:/-]{1,128}"
_CALL = re.compile(rf"{_NAME}\n\s*\{{")
_UNDECIDED = re.compile(rf"(?:{_NAME}(?:\n\s*)?)?")


class RecipientReader:
    """Removes the recipient of a text from a streamed reply, and restores the mark before that of a call."""

    def __init__(self, mark: str) -> None:
        self._mark, self._text, self._begun = mark, "", False

    def feed(self, text: str, ended: bool = False) -> str:
        """Return the reply as far as it is certain, `ended`: all of it."""
        if self._begun:
            return text
        self._text += text
        if not self._text.startswith(EVERYONE) and not ended and _UNDECIDED.fullmatch(self._text):
            return ""
        self._begun = True
        return self._mark + self._text if _CALL.match(self._text) else self._text.removeprefix(EVERYONE)
