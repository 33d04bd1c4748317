"""Mistral 7B and Nemo: Llama with a sliding window over every layer where the config gives one."""

from mycli.runtime.models import hf_config as _common
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Mistral config.json. A window as long as the context is no window."""
    fields = _common.common(raw)
    if not raw.has("num_key_value_heads"):
        fields["kv_heads"] = min(8, fields["heads"])  # the family's default, unlike Llama's
    window = raw.integer("sliding_window") if raw.has("sliding_window") else None
    if window is not None and window >= fields["max_context"]:
        window = None
    return ModelConfig(**fields, windows=_common.layer_windows(raw, fields["layers"], window))
