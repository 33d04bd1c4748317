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


def with_shared(raw: Fields, mixture: MoeLayers) -> MoeLayers | SharedLayers:
    """Return `mixture` with the shared expert that the config asks for, if any."""
    size = raw.integer("shared_intermediate_size", 0, low=0)
    return SharedLayers(mixture, size) if size else mixture


def read(raw: Fields) -> ModelConfig:
    return replace(granitemoe.read(raw), build_layer=with_shared(raw, granitemoe.mixture(raw)))
