"""Builds layers with experts: what most families have in common, by the fields of their configs."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, ScoringName, SharedExpertSpec, StackSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec
from mycli.runtime.utils.json_fields import Fields

EXPERT_KEYS = ("num_experts", "num_local_experts")  # the keys of `hf_config.NEUTRAL` that count experts
_COUNTS = (*EXPERT_KEYS, "n_routed_experts", "moe_num_experts")
_TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
MAX_EXPERTS = 1 << 15  # in all layers together: about as many as the reader accepts tensors


@dataclass(frozen=True)
class ExpertNames:
    """Names of tensors within `model.layers.<index>.<block>`; `block` may be empty."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str | None = "shared_expert_gate"  # None: its output is added as it is
    shared_linears: tuple[str, str, str] | None = None  # gate, up and down of the shared expert; None: as the others
    correction_bias: str | None = None
    correction_rows: tuple[int, ...] = ()  # leading dimensions of its shape
    stacked_gate_up: str = "experts.gate_up_proj"  # for checkpoints that stack all experts in one tensor
    stacked_down: str = "experts.down_proj"
    stacked: bool = False  # so do the family's files


@dataclass(frozen=True)
class MoeLayers:
    """Builds layers in which `count` experts replace the MLP; a `ModelConfig.build_layer`.

    size, shared: intermediate sizes of an expert and of the shared expert, 0 for none, which has biases if
    `shared_bias`. dense: layers that keep their MLP. base: builds the layers whose MLP is replaced. width: of what
    experts read, where it is a projection of the residual stream.
    """

    count: int
    routing: RoutingSpec
    size: int
    names: ExpertNames = ExpertNames()
    dense: frozenset[int] = frozenset()
    shared: int = 0
    shared_bias: bool = False
    base: Callable[[ModelConfig, int], LayerSpec] = llama_layer
    width: int | None = None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        return self.replace_mlp(self.base(config, index), config)

    def replace_mlp(self, layer: LayerSpec, config: ModelConfig) -> LayerSpec:
        """Return `layer` with experts in place of its MLP, or as it is if it is one of the `dense`."""
        if layer.index in self.dense:
            return layer
        names, block = self.names, f"model.layers.{layer.index}.{self.names.block}".rstrip(".")
        bias = f"{block}.{names.correction_bias}", (*names.correction_rows, self.count)
        shared = None
        if self.shared:
            gate = LinearSpec(f"{block}.{names.shared_gate}", 1, config.hidden_size) if names.shared_gate else None
            shared = SharedExpertSpec(self._shared(f"{block}.{names.shared}", config), gate)
        enter = leave = None
        if self.width is not None:
            enter = LinearSpec(f"{block}.fc1_latent_proj", self.width, config.hidden_size, self.shared_bias)
            leave = LinearSpec(f"{block}.fc2_latent_proj", config.hidden_size, self.width, self.shared_bias)
        assert layer.mlp is not None, f"layer {layer.index} has no MLP to replace"
        experts = ExpertsSpec(
            norm=layer.mlp.norm,
            router=LinearSpec(f"{block}.{names.router}", self.count, config.hidden_size),
            experts=tuple(
                self._mlp(f"{block}.experts.{expert}", self.size, config, hidden=self.width)
                for expert in range(self.count)
            ),
            routing=self.routing,
            stacks=self._stacks(block, config.mlp_gate),
            shared=shared,
            output_norm=layer.mlp.output_norm,
            residual_scale=layer.mlp.residual_scale,
            correction_bias=bias if names.correction_bias else None,
            enter=enter,
            leave=leave,
        )
        return replace(layer, mlp=experts)

    def _stacks(self, block: str, gated: bool) -> tuple[StackSpec, ...]:
        names = self.names
        experts = [f"{block}.experts.{expert}" for expert in range(self.count)]
        linears = (names.gate, names.up) if gated else (names.up,)
        gate_up = tuple(f"{expert}.{linear}.weight" for expert in experts for linear in linears)
        return (
            StackSpec(f"{block}.{names.stacked_gate_up}", gate_up, published=names.stacked),
            StackSpec(
                f"{block}.{names.stacked_down}",
                tuple(f"{expert}.{names.down}.weight" for expert in experts),
                published=names.stacked,
            ),
        )

    def _shared(self, prefix: str, config: ModelConfig) -> MlpSpec:
        gate, up, down = self.names.shared_linears or (self.names.gate, self.names.up, self.names.down)
        named = replace(self, names=replace(self.names, gate=gate, up=up, down=down))
        return named._mlp(prefix, self.shared, config, self.shared_bias)

    def _mlp(
        self, prefix: str, size: int, config: ModelConfig, bias: bool = False, hidden: int | None = None
    ) -> MlpSpec:
        names, hidden = self.names, hidden or config.hidden_size
        gate, up = (LinearSpec(f"{prefix}.{name}", size, hidden, bias) for name in (names.gate, names.up))
        down = LinearSpec(f"{prefix}.{names.down}", hidden, size, bias)
        return MlpSpec(size, None, (gate, up) if config.mlp_gate else (up,), down, None, config.activation)


def read_expert_groups(raw: Fields, count: int, top_k: int) -> tuple[int, int]:
    """Return the number of groups of experts, and how many take part.

    Raises ModelError for groups of different sizes, of fewer than two experts, or that contain too few.
    """
    groups = raw.integer("n_group", 1, high=count)
    top_groups = raw.integer("topk_group", 1, high=groups)
    if count % groups or groups > 1 and count < 2 * groups:
        raise raw.fail("n_group", f"= {groups} does not divide {count} experts into groups of two or more")
    if top_k > top_groups * (count // groups):
        raise raw.fail("topk_group", f"= {top_groups} of {groups} groups hold fewer than {top_k} experts")
    return groups, top_groups


def read_routing(raw: Fields, count: int, top_k: int, scoring: ScoringName = "sigmoid") -> RoutingSpec:
    """Read the routing from the keys of DeepSeek-V3 and its relatives; raises as `read_expert_groups`."""
    groups, top_groups = read_expert_groups(raw, count, top_k)
    return RoutingSpec(
        top_k,
        raw.boolean("norm_topk_prob", True),
        scoring,
        groups,
        top_groups,
        scale=raw.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
    )


def read_dense_layers(raw: Fields, layers: int, first: int = 0) -> frozenset[int]:
    """Return the layers that keep their MLP: `dense` in `mlp_layer_types`, or the first `first_k_dense_replace`.

    first: the family's default for the latter.
    """
    types = raw.array("mlp_layer_types", str, MAX_LAYERS)
    if not types:
        return frozenset(range(min(layers, raw.integer("first_k_dense_replace", first, low=0))))
    if len(types) != layers or set(types) - {"dense", "sparse"}:
        raise raw.fail("mlp_layer_types", f"must be dense or sparse for each of {layers} layers")
    return frozenset(index for index, name in enumerate(types) if name == "dense")


def read_expert_counts(
    raw: Fields, key: str, layers: int, default: tuple[int, int], top_k_key: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """Return the number of experts per layer, from `key`, and per token, from `top_k_key`.

    transformers reads either under names of other families too. Raises ModelError if two names have different values,
    if top_k is above the number of experts, or for more experts than the reader accepts.
    """
    key, top_k_key = _key_of(raw, key, _COUNTS), _key_of(raw, top_k_key, _TOP_KS)
    count = raw.integer(key, default[0])
    if count * layers > MAX_EXPERTS:
        raise raw.fail(
            key, f"= {count} in {layers} layers is more than {MAX_EXPERTS} experts in total", "the file may be damaged"
        )
    return count, raw.integer(top_k_key, default[1], high=count)


def _key_of(raw: Fields, key: str, names: Collection[str]) -> str:
    # GGUF configs have a 0 for what a model has not.
    present = [name for name in (key, *names) if raw.has(name) and (name == key or raw.values[name] != 0)]
    for name in present[1:]:
        if raw.values[name] != raw.values[present[0]]:
            raise raw.fail(name, f"= {raw.values[name]!r:.40} differs from {present[0]}", "keep one")
    return present[0] if present else key
