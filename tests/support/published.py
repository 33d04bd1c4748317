"""Configurations of published models with the figures they came with; no weights."""

import json
from typing import Any

from mycli.runtime.models.config import ModelConfig, parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.paths import ROOT

PUBLISHED: dict[str, Any] = json.loads((ROOT / "tests" / "support" / "published_models.json").read_text())


def published(name: str) -> ModelConfig:
    """The configuration of the model of that name."""
    return parse_config(Fields(PUBLISHED[name]["config"], "config.json"))
