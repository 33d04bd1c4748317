"""Granite 4 previews with experts and a shared expert: Granite with experts, and an MLP that all tokens go through."""

from dataclasses import dataclass, replace

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import MoeLayers
from mycli.runtime.models.experts_spec import ExpertsSpec, SharedExpertSpec
from mycli.runtime.models.families import granitemoe
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class SharedLayers:
    """Builds the layers. size: intermediate size of the shared expert."""

    mixture: MoeLayers
    size: int

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer, name, hidden = self.mixture(config, index), f"model.layers.{index}.shared_mlp", config.hidden_size
        assert isinstance(layer.mlp, ExpertsSpec)
        gate_up = LinearSpec(f"{name}.input_linear", 2 * self.size, hidden)
        down = LinearSpec(f"{name}.output_linear", hidden, self.size)
        shared = MlpSpec(self.size, None, (gate_up,), down, activation=config.activation)
        return replace(layer, mlp=replace(layer.mlp, shared=SharedExpertSpec(shared)))


def read(raw: Fields) -> ModelConfig:
    config, size = granitemoe.read(raw), raw.integer("shared_intermediate_size", 0, low=0)
    mixture = config.build_layer
    assert isinstance(mixture, MoeLayers)
    return replace(config, build_layer=SharedLayers(mixture, size)) if size else config
