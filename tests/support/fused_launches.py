"""Counts the launches of a layer in the fused pass from its spec; `test_fused` compares them with the interpreter."""

from collections import Counter

from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec

ROUTED = (
    "score_kernel",
    "choose_kernel",
    "place_kernel",
    "epilogue_kernel",
    "combine_kernel",
)  # additionally with experts


def launches_of_layer(spec: LayerSpec, rows: int = 1) -> Counter[str]:
    """Return launches by kernel, without the sums of split products that have no epilogue.

    Of more than 8 rows each product's epilogue is a launch.
    """
    counts = Counter({"multiply_kernel": 4, "attend_kernel": 1})
    if rows > 8:
        counts["epilogue_kernel"] = 2 if isinstance(spec.mlp, ExpertsSpec) else 4
    attention, mlp = spec.attention, spec.mlp
    counts["norm_add_kernel"] = sum(part.output_norm is not None for part in (attention, mlp))
    counts["epilogue_kernel"] += int(attention.q_norm is not None and attention.q_norm.size != attention.head_dim)
    if isinstance(mlp, ExpertsSpec):
        counts.update(ROUTED)
        if mlp.shared is not None:
            counts.update({"multiply_kernel": 2, "epilogue_kernel": 1})
    return +counts
