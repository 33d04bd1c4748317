"""Configurations of published models with their published figures; no weights.

`parameters` are exact for the text part; `about`: as rounded in the publication; `active`: the active parameters of a
token, as published, with the embeddings unless `embeddings` is false.
"""

import json
from functools import cache
from typing import Any

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields
from mycli.runtime.utils.memory import gc_freeze, gc_paused
from tests.support.paths import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "tests" / "support" / "published_models.json").read_text())


@cache
def published(name: str) -> ModelConfig:
    """Return the configuration of a published model; one with many experts takes a moment."""
    # All of them are a million objects that live until the end: to search them for garbage took most of the time.
    with gc_paused():
        config = ModelFolder.from_config(Fields(PUBLISHED[name]["config"], "config.json")).config
        gc_freeze()
    return config


def plan(name: str, packing: Packing | None = None, head: Packing | None = None, **changes: Any) -> MemoryPlan:
    """Return the memory plan of a published model, packed or not; `changes` are further arguments."""
    config = published(name)
    return MemoryPlan(config, PackingScheme(packing, head).packings(config), **changes)
