"""The file types of llama.cpp, such as q4_k_m: which ggml type each tensor gets. Imports no torch.

The rules are those of llama-quantize with an importance matrix (llama.cpp b11434, src/llama-quant.cpp), so that files
have the same size. Tensor names are those of GGUF.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.errors import UsageError

Spot = Callable[["MixPlace"], bool]

GGUF_EMBEDDING, GGUF_HEAD = "token_embd.weight", "output.weight"
_EMBEDDINGS = (GGUF_EMBEDDING, "per_layer_token_embd.weight")
# attn_kv_b and attn_qkv contain values, and count as attn_v.
_VALUES = ("attn_qkv", "attn_kv_b", "attn_v")
# Latent attention's attn_q_a, attn_q_b and attn_kv_a_mqa have no role, hence whole names of attention. Those of the
# feed-forward part may have an ending, as in ffn_up_exps.
_ATTENTION_ROLES = (*_VALUES, "attn_k", "attn_q", "attn_output")
_FEED_FORWARD_ROLES = ("ffn_up", "ffn_gate", "ffn_down")
# Replacements for rows that do not fill super-blocks of 256. The result takes more bits, never fewer.
_NARROW = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
_EIGHT_EXPERTS_OUTPUT: tuple[str, ...] = ("q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m")
_EIGHT_EXPERTS_OUTPUT += ("iq3_s", "iq3_m", "iq4_xs")
# llama.cpp recognizes a 70B model by its number of layers. It has few heads of v, so more bits for v cost little.
_LARGE_LAYERS = 80


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model that decide types; queries_per_key: of the first layer, 0 if it has no keys."""

    layers: int
    queries_per_key: int
    experts: int
    architecture: str
    tied: bool

    @property
    def is_70b(self) -> bool:
        return self.architecture in ("llama", "qwen2") and self.layers == _LARGE_LAYERS and self.queries_per_key > 1


@dataclass(frozen=True)
class MixPlace:
    """A tensor among `count` of its role. index: the number of those before it; its layer in a mixture of experts.

    Tensors that contain values have one role.
    """

    index: int
    count: int
    model: ModelShape


def _always(place: MixPlace) -> bool:
    return True


def _first(part: int) -> Spot:
    return lambda place: place.index < place.count // part


def _more(place: MixPlace) -> bool:
    # The first and last eighth of the layers, and every third between them (use_more_bits of llama-quant.cpp).
    eighth = place.count // 8
    return place.index < eighth or place.index >= 7 * place.count // 8 or (place.index - eighth) % 3 == 2


def _middle(place: MixPlace) -> bool:
    return place.count // 8 <= place.index < 7 * place.count // 8


def _shared_keys(place: MixPlace) -> bool:
    return place.model.queries_per_key >= 4


def _shared_keys_or_experts(place: MixPlace) -> bool:
    return place.model.queries_per_key >= 4 or place.model.experts >= 4


def _eight_experts(place: MixPlace) -> bool:
    return place.model.experts == 8


@dataclass(frozen=True)
class Mix:
    """A file type: `general.file_type`, the type of most tensors, and by role the first rule that applies."""

    id: int
    base: str
    rules: Mapping[str, tuple[tuple[str, Spot], ...]] = field(default_factory=dict)
    head: str = "Q6_K"
    embedding: str | None = None  # type of an embedding that is not tied to the head; None: the base type
    low: bool = False  # a type below three bits, for which mixtures of experts have other exceptions


def _low(base: str, id_: int, better: str, embedding: str, output: bool) -> Mix:
    rules: dict[str, tuple[tuple[str, Spot], ...]] = {
        "v": (("Q4_K", _shared_keys_or_experts), (better, _always)),
        "attn_k": (("Q4_K", _eight_experts),),
        "ffn_down": ((better, _first(8)),),
        "attn_output": (("Q5_K", _eight_experts), *(((better, _always),) if output else ())),
    }
    return Mix(id_, base, rules, "Q5_K", embedding, low=True)


MIXES: Mapping[str, Mix] = {
    "q4_0": Mix(2, "Q4_0", {"ffn_down": (("Q4_1", _first(8)),)}),
    "q4_1": Mix(3, "Q4_1"),
    "q5_0": Mix(8, "Q5_0", {"ffn_down": (("Q5_1", _first(8)),)}),
    "q5_1": Mix(9, "Q5_1"),
    "q8_0": Mix(7, "Q8_0", head="Q8_0"),
    "q2_k": Mix(
        10,
        "Q2_K",
        {
            "v": (("Q4_K", _shared_keys), ("Q3_K", _always)),
            "ffn_down": (("Q3_K", _always),),
            "attn_output": (("Q3_K", _always),),
        },
    ),
    "q2_k_s": Mix(21, "Q2_K", {"v": (("Q4_K", _shared_keys),), "ffn_down": (("Q4_K", _first(8)),)}),
    "q3_k_s": Mix(11, "Q3_K"),
    "q3_k_m": Mix(
        12,
        "Q3_K",
        {
            "v": (("Q5_K", lambda place: place.index < 2), ("Q4_K", _always)),
            "ffn_down": (("Q5_K", _first(16)), ("Q4_K", _always)),
            "attn_output": (("Q4_K", _always),),
        },
    ),
    "q3_k_l": Mix(13, "Q3_K", {role: (("Q5_K", _always),) for role in ("v", "ffn_down", "attn_output")}),
    "q4_k_s": Mix(14, "Q4_K", {"v": (("Q5_K", lambda place: place.index < 4),), "ffn_down": (("Q5_K", _first(8)),)}),
    "q4_k_m": Mix(15, "Q4_K", {role: (("Q6_K", _more),) for role in ("v", "ffn_down")}),
    "q5_k_s": Mix(16, "Q5_K"),
    "q5_k_m": Mix(17, "Q5_K", {role: (("Q6_K", _more),) for role in ("v", "ffn_down")}),
    "q6_k": Mix(18, "Q6_K"),
    "iq2_xxs": _low("IQ2_XXS", 19, "Q2_K", "Q2_K", output=False),
    "iq2_xs": _low("IQ2_XS", 20, "Q2_K", "Q2_K", output=False),
    "iq2_s": _low("IQ2_XS", 28, "IQ3_S", "IQ3_S", output=True),
    "iq2_m": _low("IQ2_S", 29, "IQ3_S", "IQ3_S", output=True),
    "iq3_xxs": Mix(
        23,
        "IQ3_XXS",
        {
            "v": (("Q4_K", _shared_keys),),
            "attn_k": (("IQ2_S", _always),),
            "attn_q": (("IQ2_S", _always),),
            "attn_output": (("IQ3_S", _always),),
        },
        "Q5_K",
        "IQ3_S",
    ),
    "iq3_xs": Mix(
        22,
        "IQ3_S",
        {
            "v": (("Q4_K", _shared_keys),),
            "attn_k": (("IQ3_XXS", _always),),
            "attn_q": (("IQ3_XXS", _always),),
            "ffn_gate": (("IQ3_XXS", _middle),),
            "ffn_up": (("IQ3_XXS", _middle),),
        },
    ),
    "iq3_s": Mix(26, "IQ3_S", {"v": (("Q4_K", _shared_keys),)}),
    "iq3_m": Mix(
        27,
        "IQ3_S",
        {
            "v": (("Q4_K", _always),),
            "ffn_down": (("Q4_K", _first(8)), ("Q4_K", lambda place: _eight_experts(place) and _more(place))),
            "attn_output": (("Q4_K", _always),),
        },
    ),
    "iq4_nl": Mix(25, "IQ4_NL", {"v": (("Q5_K", _shared_keys),)}),
    "iq4_xs": Mix(30, "IQ4_XS", {"v": (("Q5_K", _shared_keys),)}),
}


DEFAULT_MIX = "q4_k_m"


def load_mix(name: str) -> Mix:
    """Return a file type by name. Raises UsageError listing the choices."""
    if name not in MIXES:
        raise UsageError(f"{name}: not a GGUF file type that mycli writes", f"choose from: {', '.join(MIXES)}")
    return MIXES[name]


def choose_types(name: str, tensors: Iterable[tuple[str, int]], model: ModelShape) -> dict[str, str]:
    """Return the type of each tensor, given as name and length of a row, that the file type `name` quantizes."""
    mix, tensors = load_mix(name), sorted(tensors, key=lambda tensor: (_layer(tensor[0]), tensor[0]))
    values = sum(_role(tensor) == "v" for tensor, _ in tensors)
    counts: dict[str, int] = {}
    types = {}
    for tensor, columns in tensors:
        role = _role(tensor)
        by_layer = model.experts > 1 and role != "v" and not mix.low
        place = MixPlace(
            _layer(tensor) if by_layer else counts.get(role, 0),
            values if role == "v" else model.layers,
            model,
        )
        counts[role] = counts.get(role, 0) + 1
        types[tensor] = _narrow(_type(name, mix, tensor, columns, role, place), columns)
    return types


def _type(name: str, mix: Mix, tensor: str, columns: int, role: str, place: MixPlace) -> str:
    if tensor == GGUF_HEAD or (tensor in _EMBEDDINGS and place.model.tied):
        return "Q8_0" if columns % TYPES_BY_NAME[mix.base].block else mix.head
    if tensor in _EMBEDDINGS:
        return mix.embedding or mix.base
    rules = mix.rules.get(role, ())
    kind = next((better for better, applies in rules if applies(place)), mix.base)
    if mix.low:
        return kind
    if role == "v" and place.model.is_70b and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    if place.model.experts == 8 and role in ("v", "attn_k"):
        return "Q8_0"
    if place.model.experts == 8 and role == "attn_output":
        return "Q5_K" if name in _EIGHT_EXPERTS_OUTPUT else mix.base
    return kind


def _narrow(kind: str, columns: int) -> str:
    if columns % TYPES_BY_NAME[kind].block:
        kind = _NARROW.get(kind, kind)
    return kind if columns % TYPES_BY_NAME[kind].block == 0 else "F16"


def _role(tensor: str) -> str:
    role = next((role for role in _ATTENTION_ROLES if tensor.endswith(f"{role}.weight")), "")
    if role in _VALUES:
        return "v"
    return role or next((role for role in _FEED_FORWARD_ROLES if role in tensor), "")


def _layer(tensor: str) -> int:
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match else -1
