"""The tensors and keys of experts, for all architectures that have them, in both directions. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping

from mycli.runtime.checkpoint.gguf.architecture import Config, GgufKey
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec

SOFTMAX, SIGMOID, SOFTMAX_WEIGHT = 1, 2, 3  # values of expert_gating_func; the last: over the selected experts only


def experts_spec(config: ModelConfig) -> ExpertsSpec:
    """Return the experts of the first layer that has some."""
    return next(spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec))


def leading_dense_layers(config: ModelConfig) -> int:
    """Return the number of layers before the first one with experts."""
    return next(spec.index for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec))


def expert_tensors(
    block: str = "mlp",
    router: str = "gate",
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    shared: str | None = None,
    bias: str | None = None,
) -> Mapping[str, TensorRule]:
    """Return the rules of a mixture in `block` by GGUF name; `shared`, `bias`: those of the shared expert, the scores.

    Stacked experts are also read where gate and up are one tensor.
    """
    expert = f"{block}.experts.{{expert}}"
    rules = {
        "ffn_gate_inp": TensorRule(f"{block}.{router}"),
        "ffn_gate_up_exps": TensorRule(f"{expert}.{gate}", more_names=(f"{expert}.{up}",)),
        "ffn_gate_exps": TensorRule(f"{expert}.{gate}"),
        "ffn_up_exps": TensorRule(f"{expert}.{up}"),
        "ffn_down_exps": TensorRule(f"{expert}.{down}"),
    }
    if shared is not None:
        rules |= {
            "ffn_gate_shexp": TensorRule(f"{block}.{shared}.gate_proj"),
            "ffn_up_shexp": TensorRule(f"{block}.{shared}.up_proj"),
            "ffn_down_shexp": TensorRule(f"{block}.{shared}.down_proj"),
        }
    if bias is not None:
        rules["exp_probs_b"] = TensorRule(f"{block}.{bias}", suffixes={".bias": ""})
    return rules


def joined_shared_expert(
    gate: str = "ffn_gate_shexp",
    up: str = "ffn_up_shexp",
    down: str = "ffn_down_shexp",
    size: Callable[[ModelConfig], int] | None = None,
) -> dict[str, TensorRule]:
    """Return the rules of Granite's shared expert, whose gate and up are one tensor; `size`: its width."""
    joined = TensorRule("shared_mlp.input_linear", followed_by=up, first_rows=size or shared_size)
    return {gate: joined, down: TensorRule("shared_mlp.output_linear")}


def expert_keys(
    count: str = "num_experts", used: str = "num_experts_per_tok", size: str | None = "moe_intermediate_size"
) -> tuple[GgufKey, ...]:
    """Return the keys of a mixture whose config.json has these fields; without `size` it is intermediate_size."""
    keys = (
        GgufKey("expert_count", count, required=True, write=lambda config: len(experts_spec(config).experts)),
        GgufKey("expert_used_count", used, required=True, write=lambda config: experts_spec(config).top_k),
    )
    if size is None:
        return keys
    return (*keys, GgufKey("expert_feed_forward_length", size, write=lambda config: experts_spec(config).size))


def shared_size_key(field: str = "shared_expert_intermediate_size") -> GgufKey:
    return GgufKey("expert_shared_feed_forward_length", field, write=shared_size)


def shared_size(config: ModelConfig) -> int:
    """Return the size of all shared experts of a layer together; 0 without one."""
    shared = experts_spec(config).shared
    return 0 if shared is None else shared.mlp.size


def shared_count_key(field: str = "n_shared_experts") -> GgufKey:
    """Return the key for families whose shared experts count in sizes of a routed one."""
    return GgufKey(
        "expert_shared_count",
        field,
        default=0,
        required=True,
        write=lambda config: shared_size(config) // experts_spec(config).size,
    )


def dense_layers_key(field: str) -> GgufKey:
    return GgufKey("leading_dense_block_count", field, default=0, required=True, write=leading_dense_layers)


def scale_key(field: str = "routed_scaling_factor") -> GgufKey:
    return GgufKey("expert_weights_scale", field, float, write=lambda config: float(experts_spec(config).routing.scale))


SCALE_KEY = scale_key()
GROUP_KEYS = (
    GgufKey("expert_group_count", "n_group", write=lambda config: experts_spec(config).routing.groups),
    GgufKey("expert_group_used_count", "topk_group", write=lambda config: experts_spec(config).routing.top_groups),
)
NORM_KEY = GgufKey(
    "expert_weights_norm",
    "norm_topk_prob",
    bool,
    default=False,
    required=True,
    write=lambda config: experts_spec(config).routing.normalize,
)


def _routings(config: ModelConfig) -> Iterator[RoutingSpec]:
    return (spec.mlp.routing for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec))


EXPERT_GROUPS = (
    Requirement(
        "fewer groups of experts in use than there are",
        lambda config: all(routing.groups == 1 or routing.top_groups < routing.groups for routing in _routings(config)),
    ),
    # DeepSeek-V2 takes the best one.
    Requirement(
        "groups of experts scored by their two best experts",
        lambda config: all(routing.groups == 1 or routing.group_best == 2 for routing in _routings(config)),
    ),
)


def require_norm(model: GgufModel) -> None:
    """Raise ModelError unless weights of experts are normalized, as in families without another way."""
    if not model.boolean(NORM_KEY.name):
        raise model.metadata.fail(model.key(NORM_KEY.name), "must be true for this architecture")


def layer_kinds(model: GgufModel, config: Config) -> list[str]:
    """Return `mlp_layer_types` by which layers have a router."""
    routers = (f"blk.{index}.ffn_gate_inp.weight" for index in range(config["num_hidden_layers"]))
    return ["sparse" if router in model.tensors else "dense" for router in routers]
