"""Configurations of published models with the figures they came with; no weights.

`parameters` are those of the text part, exact; `about`: as rounded as they were told; `active`: those that a
token meets, likewise, with the embeddings unless `embeddings` is false.
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
from tests.support.paths import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "tests" / "support" / "published_models.json").read_text())


@cache
def published(name: str) -> ModelConfig:
    """The configuration of the model of that name; one of many experts takes a moment."""
    return ModelFolder.from_config(Fields(PUBLISHED[name]["config"], "config.json")).config


def plan(name: str, packing: Packing | None = None, head: Packing | None = None, **changes: Any) -> MemoryPlan:
    """Of the model of that name, packed or not, and what else is asked of it."""
    config = published(name)
    return MemoryPlan(config, PackingScheme(packing, head).packings(config), **changes)
