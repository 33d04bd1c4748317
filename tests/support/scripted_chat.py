"""`mycli` whose model says what MYTEST_REPLIES (a JSON list of texts) tells it to, one token at a time.

The tokens are pico's, which has bytes for what it has no words for: an emoji arrives in several.
"""

import json
import os
import time
from collections.abc import Generator, Sequence
from typing import Any

from mycli.cli.main import main
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.completion import LoadedModel
from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.stats import Timing

REPLIES = json.loads(os.environ["MYTEST_REPLIES"])
SECONDS = float(os.environ.get("MYTEST_SECONDS", "0"))  # between two tokens
load = LoadedModel.load.__func__  # type: ignore[attr-defined]  # of a classmethod


def loading(cls: Any, folder: Any, placement: Placement, **options: Any) -> LoadedModel:
    loaded: LoadedModel = load(cls, folder, placement, **options)
    loaded.runner.__dict__["said"] = [loaded.tokenizer.encode(text, add_special=False) for text in REPLIES]
    return loaded


def generate(self: Session, prompt: Sequence[int], *_: Any) -> Generator[list[int], None, None]:
    self.timing = Timing(prompt=len(prompt))
    self.stopped = True
    for token in self.runner.__dict__["said"].pop(0):
        time.sleep(SECONDS)
        self.timing.token_seconds.append(0.01)
        yield [token]


LoadedModel.load = classmethod(loading)  # type: ignore[method-assign, assignment]  # this program is the test's
Session.generate = generate  # type: ignore[method-assign, assignment]  # as above
main()
