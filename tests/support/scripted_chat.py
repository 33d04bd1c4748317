"""Runs `mycli` with a model whose replies are scripted by MYTEST_REPLIES (a JSON list of texts), one token per step.

The tokens are pico's, which falls back to bytes: an emoji arrives in several.
"""

import json
import os
import time
from typing import Any

from mycli.cli.main import main
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import Request, SequenceOutput

REPLIES = json.loads(os.environ["MYTEST_REPLIES"])
SECONDS = float(os.environ.get("MYTEST_SECONDS", "0"))  # between two tokens
load = LoadedModel.load.__func__  # type: ignore[attr-defined]  # of a classmethod


def loading(cls: Any, folder: Any, placement: Placement, **options: Any) -> LoadedModel:
    loaded: LoadedModel = load(cls, folder, placement, **options)
    loaded.runner.__dict__["said"] = [loaded.tokenizer.encode(text, add_special=False) for text in REPLIES]
    return loaded


def said(self: Engine) -> list[SequenceOutput]:
    (number,) = self.__dict__.setdefault("numbers", [])
    script = self.runner.__dict__["said"]
    self.step_seconds = 0.01
    time.sleep(SECONDS)
    if script[0]:
        self.__dict__["begun"] = True
        return [SequenceOutput(number, (script[0].pop(0),))]
    script.pop(0)
    self.__dict__["begun"] = False
    self.__dict__["numbers"].clear()
    return [SequenceOutput(number, finish_reason="stop")]


def submit(self: Engine, request: Request) -> int:
    if self.__dict__.pop("begun", False):  # the previous reply was stopped
        self.runner.__dict__["said"].pop(0)
    self.__dict__["numbers"] = [0]
    return 0


LoadedModel.load = classmethod(loading)  # type: ignore[method-assign, assignment]  # this process only serves the test
Engine.step = said  # type: ignore[method-assign]  # as above
Engine.submit = submit  # type: ignore[method-assign]  # as above
main()
