"""Granite with sliding windows and experts: granite_swa's attention, experts and an optional shared expert."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import ExpertNames
from mycli.runtime.models.families import granite_swa, granitemoe, granitemoeshared
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("block_sparse_moe", router="router", stacked=True)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, sliding_window=128)
    mixture = replace(granitemoe.mixture(raw), names=_NAMES, base=granite_swa.layer)
    config = granite_swa.with_windows(raw, granitemoe.read(raw))
    return replace(config, build_layer=granitemoeshared.with_shared(raw, mixture))
