"""MPNet encoders, which compute embeddings (all-mpnet-base): BERT with biases of attention scores by distance."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import bert
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, PositionSpec
from mycli.runtime.utils.json_fields import Fields

_DISTANCES = 32  # buckets of distances, whatever config.json says
_FIRST = 2  # transformers fixes the padding token, after which positions start, at 1


def layer(config: ModelConfig, index: int) -> LayerSpec:
    spec, name = bert.layer(config, index), f"model.layers.{index}"
    attention = replace(
        spec.attention,
        qkv=tuple(
            replace(linear, name=f"{name}.attention.attn.{part}")
            for linear, part in zip(spec.attention.qkv, "qkv", strict=True)
        ),
        o=replace(spec.attention.o, name=f"{name}.attention.attn.o"),
    )
    mlp = replace(spec.dense_mlp, norm=config.norm_spec(f"{name}.attention.LayerNorm"))
    return replace(spec, mixer=attention, mlp=mlp, ignored_prefixes=(*spec.ignored_prefixes, "mpnet.pooler."))


def read(raw: Fields) -> ModelConfig:
    hf_config.require(raw, relative_attention_num_buckets=_DISTANCES)
    config = bert.read_bert(raw, "mpnet", first_position=_FIRST)
    assert config.positions is not None
    distances = LinearSpec("model.relative_attention_bias", _DISTANCES, config.heads)
    return replace(
        config,
        positions=PositionSpec(config.positions.table, None, _FIRST, distances),
        stored_prefixes=(
            *config.stored_prefixes,
            *((f"{root}encoder.relative_", "model.relative_") for root in ("", "mpnet.")),
        ),
        build_layer=layer,
    )
