"""Command A with experts: Command R7B's parallel parts, with experts and an optional shared expert."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_dense_layers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class CohereMoeLayers:
    """Builds the layers. dense_size: of the MLPs that stay; halved: experts and shared expert are averaged."""

    mixture: MoeLayers
    dense_size: int
    halved: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        dense = index in self.mixture.dense
        llama = llama_layer(config, index, intermediate_size=self.dense_size if dense else None)
        layer = replace(llama, mlp=replace(llama.dense_mlp, norm=None), parallel=True)
        layer = self.mixture.replace_mlp(layer, config)
        # Half the sum of experts and shared expert: the same as half the share of this part in the stream.
        if dense or not self.halved:
            return layer
        assert isinstance(layer.mlp, ExpertsSpec)
        return replace(layer, mlp=replace(layer.mlp, residual_scale=0.5))


def _mixture(raw: Fields, fields: dict[str, int]) -> CohereMoeLayers:
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(8, 2))
    scoring = raw.text("expert_selection_fn", "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise raw.fail("expert_selection_fn", f"{scoring!r:.40} is not supported")
    combination = raw.text("shared_expert_combination_strategy", "average")
    if combination not in ("average", "sum"):
        raise raw.fail("shared_expert_combination_strategy", f"{combination!r:.40} is not supported")
    sigmoid, size = scoring == "sigmoid", fields["intermediate_size"]
    shared = raw.integer("num_shared_experts", 0, low=0, high=count)
    mixture = MoeLayers(
        count,
        RoutingSpec(
            top_k, raw.boolean("norm_topk_prob", True) if sigmoid else True, "sigmoid" if sigmoid else "softmax"
        ),
        size,
        ExpertNames(shared="shared_experts", shared_gate=None),
        dense=read_dense_layers(raw, fields["layers"]),
        shared=size * shared,
    )
    dense_size = raw.integer("prefix_dense_intermediate_size", size)
    return CohereMoeLayers(mixture, dense_size, bool(shared) and combination == "average")


def read(raw: Fields) -> ModelConfig:
    hf_config.require(raw, rope_scaling=None)  # transformers reads rope_parameters and rope_theta only
    rms = raw.has("rms_norm_eps")
    raw = hf_config.with_defaults(raw, sliding_window=4096, head_dim=128, tie_word_embeddings=True, logit_scale=0.0625)
    if not rms:  # rms_norm_eps also selects the kind of norm
        eps = raw.number("layer_norm_eps", 1e-5, low=1e-30, high=1.0)
        raw = Fields({**raw.values, "rms_norm_eps": eps}, raw.source)
    fields = hf_config.common(raw, handled=("logit_scale", *EXPERT_KEYS))
    layers, mixture = fields["layers"], _mixture(raw, fields)
    prefix, prefix_period = (
        raw.integer("first_k_dense_replace", 0, low=0),
        raw.integer("prefix_dense_sliding_window_pattern", 1),
    )
    period = raw.integer("sliding_window_pattern", 4)

    def slides_by_default(index: int) -> bool:
        return bool((index + 1) % prefix_period if index < prefix else (index - prefix + 1) % period)

    sliding = hf_config.layers_of_type(raw, layers, slides_by_default)
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"], interleaved=True)
    # Layers with full attention have no positions, except the leading layers with an MLP if none of those slides.
    rotates = (slides or (prefix_period == 1 and i in mixture.mixture.dense) for i, slides in enumerate(sliding))
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=tuple(rope if rotated else None for rotated in rotates),
        layer_norm=not rms,
        logit_scale=raw.number("logit_scale", low=1e-9),
        build_layer=mixture,
    )
