"""Granite 4 H: Mamba-2 in most layers, attention without rotation in the others; a shared MLP, maybe with experts."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, SharedExpertSpec
from mycli.runtime.models.families import granite, granitemoe
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import MambaLayers, read_mamba, recurrent_layers
from mycli.runtime.models.multimodal import SEPARATE_GATE
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class GraniteHybridLayers:
    """Builds the layers: Mamba-2 where `recurrent`, else attention. shared: size of the MLP; mixture: the experts.

    separate: the MLP has Llama's names, which mlx-lm gives it in models without experts.
    """

    recurrent: tuple[bool, ...]
    mamba: MambaLayers
    shared: int
    mixture: MoeLayers | None
    separate: bool = False

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer = llama_layer(config, index, intermediate_size=self.shared if self.separate else None)
        if self.recurrent[index]:
            layer = replace(layer, mixer=self.mamba.mixer(config, index))
        if self.separate and self.mixture is None:
            return layer
        mlp = self._shared_mlp(config, layer.dense_mlp, f"model.layers.{index}.shared_mlp")
        if self.mixture is None:
            return replace(layer, mlp=mlp)
        experts = self.mixture.replace_mlp(layer, config).mlp
        assert isinstance(experts, ExpertsSpec)
        shared = SharedExpertSpec(replace(mlp, norm=None, residual_scale=1.0))
        return replace(layer, mlp=replace(experts, shared=shared))

    def _shared_mlp(self, config: ModelConfig, base: MlpSpec, name: str) -> MlpSpec:
        gate_up = LinearSpec(f"{name}.input_linear", 2 * self.shared, config.hidden_size)
        down = LinearSpec(f"{name}.output_linear", config.hidden_size, self.shared)
        return replace(base, size=self.shared, gate_up=(gate_up,), down=down)


def read(raw: Fields) -> ModelConfig:
    config = granite.read_granite(raw, EXPERT_KEYS)
    mixture = None
    if raw.integer("num_local_experts", 8, low=0):
        count, top_k = read_expert_counts(raw, "num_local_experts", config.layers, default=(8, 2))
        routing = RoutingSpec(top_k, normalize=True)
        mixture = MoeLayers(count, routing, config.intermediate_size, granitemoe.EXPERT_NAMES)
    kind = raw.text("position_embedding_type", "nope")
    if kind not in ("rope", "nope"):
        raise raw.fail("position_embedding_type", f"{kind!r:.40} is not supported (rope, nope)")
    hf_config.require(raw, normalization_function="rmsnorm", hidden_act="silu")
    layers = GraniteHybridLayers(
        recurrent_layers(raw, config.layers),
        read_mamba(raw),
        raw.integer("shared_intermediate_size", 1024),
        mixture,
        raw.boolean(SEPARATE_GATE, False),
    )
    ropes = () if kind == "rope" else (None,) * config.layers
    return replace(config, layer_ropes=ropes, build_layer=layers)
