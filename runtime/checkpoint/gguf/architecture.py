"""The declaration of a GGUF architecture: tensors and metadata keys, for reading and writing.

`architectures/` has one declaration per file. Names and changes are those of llama.cpp's conversion/. What is read
becomes a config.json, which the family's own reader accepts or refuses. Imports no torch.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mycli.runtime.checkpoint.gguf.header import GgufHeader, GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.rope import ROPE_TENSORS, rope_keys, rope_parameters
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, Place, TensorRule
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.utils.json_fields import Fields

Config = dict[str, Any]  # of config.json
_EXPERT = "{expert}"
_MAX_EXPERTS = 4096  # of a layer: bounds what a stack is split into; published models have up to 512


@dataclass(frozen=True)
class GgufKey:
    """A metadata key and the config.json field of the same meaning."""

    name: str  # without the architecture's name in front
    field: str
    kind: type[int] | type[float] | type[bool] = int
    default: int | float | bool | None = None  # of a missing key; None leaves the field out
    required: bool = False  # a missing key is an error
    applies: Callable[[Config], bool] = lambda config: True  # to the config read so far; else the key is not read
    write: Callable[[ModelConfig], Any] | None = None  # the value to write; None: the key is not written

    def read(self, model: GgufModel, config: Config) -> Config:
        if not self.applies(config) or (not model.has(self.name) and self.default is None and not self.required):
            return {}
        if self.kind is float:
            return {self.field: model.number(self.name, self.default)}
        if self.kind is bool:
            return {self.field: model.boolean(self.name, bool(self.default))}
        # The integer 0 means "none" in GGUF, so it leaves the field out as well.
        value = model.integer(self.name, None if self.default is None else int(self.default))
        return {self.field: value} if value or self.required else {}


QKV_BIASES = ("attn_q", "attn_k", "attn_v", "attn_qkv")  # known in every architecture with these tensors
ALL_BIASES = (*QKV_BIASES, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORM_BIASES = ("attn_norm", "ffn_norm", "output_norm")
LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"


def linear_biases(model: GgufModel, config: Config) -> Config:
    """Return the config fields that say which linears have biases: GGUF has no key, the tensors tell."""
    names = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {name: bias in model.tensors for name, bias in names.items()}


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp; `read_config` and `write_keys` return what no rule expresses."""

    name: str  # general.architecture
    model_type: str  # of the family that its files are read as
    written_types: tuple[str, ...] = ()  # families that export writes as this architecture
    multimodal_types: tuple[str, ...] = ()  # outer types whose text part is written as this, in place of its own type
    layer_tensors: Mapping[str, TensorRule] = field(default_factory=lambda: LLAMA_TENSORS)  # without "blk.N."
    model_tensors: Mapping[str, TensorRule] = field(default_factory=lambda: MODEL_TENSORS)
    keys: tuple[GgufKey, ...] = ()  # in addition to those that all architectures have
    latent: bool = False  # heads have sizes of their own; those in the common keys are what the cache stores
    value_length: bool = False  # values may be narrower than keys
    gated_queries: bool = False  # attn_q has a gate for each query
    slides: Callable[[int], bool] | None = None  # whether a layer has the sliding window; None: all or none have
    gating: tuple[int, ...] = ()  # values of expert_gating_func that the family computes; () leaves the key unread
    pattern: bool = False  # export writes sliding_window_pattern; where a file lacks it, `slides` counts
    ignored: tuple[str, ...] = ()  # tensors that nothing reads
    by_layer: tuple[str, ...] = ()  # keys that may differ by layer: the largest value counts, the rest is read_config's
    optional: tuple[str, ...] = ()  # keys that may be missing
    # Tensors that recurrent layers have in place of others of the same Hugging Face name.
    recurrent_tensors: Mapping[str, TensorRule] = field(default_factory=dict)
    recurrent_layers: frozenset[int] = frozenset()  # of the model to write, where there are such tensors
    # Tensors of one value in a layer that GGUF has as metadata: name in the layer by the key of an array of all layers.
    key_tensors: Mapping[str, str] = field(default_factory=dict)
    # Whether a file of this name is read as this, by its header and whether it has experts.
    reads: Callable[[GgufHeader, bool], bool] = lambda header, experts: True
    writes: Callable[[ModelConfig], bool] = lambda config: True  # whether a model of `written_types` is written as this
    # What export asks of a model, because llama.cpp would not load its file: shapes, and the tensors whose biases it
    # knows. Both are not asked of files that are read.
    requires: tuple[Requirement, ...] = ()
    biases: tuple[str, ...] = QKV_BIASES
    # The model without the factors that are multiplied into its weights, and those of a tensor: one for each row, one
    # for all, or none.
    folded: Callable[[ModelConfig], ModelConfig] = lambda config: config
    factors: Callable[[ModelConfig, str], Sequence[float]] = lambda config, tensor: ()
    # Tensors that llama.cpp requires and does not read, each by one of the same type and shape. They are zeros.
    unread: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    own_head: bool = False  # llama.cpp requires output.weight: a tied model's embedding is written twice
    has_mtp_blocks: bool = False  # block_count includes those of an MTP head, nextn_predict_layers says how many
    epsilon: str = "attention.layer_norm_rms_epsilon"
    default_epsilon: float | None = None  # of a file without the key; None: it is required
    epsilon_field: str = "rms_norm_eps"  # of config.json
    read_config: Callable[[GgufModel, Config], Config] = lambda model, config: {}
    write_keys: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    # Keys of a text part, from what its config.json says about images.
    write_multimodal: Callable[[ModelConfig, Fields], dict[str, Any]] = lambda config, images: {}

    @cached_property
    def _rules(self) -> dict[str, tuple[str, TensorRule]]:
        """Hugging Face name and rule by GGUF name, both with {layer}."""
        layers = {
            f"blk.{{layer}}.{name}": (f"model.layers.{{layer}}.{rule.name}", rule)
            for name, rule in self.layer_tensors.items()
        }
        model = {name: (rule.name, rule) for name, rule in self.model_tensors.items()}
        return {
            # A norm's bias is stored as it is.
            f"{stored}{ending}": (f"{name}{suffix}", replace(rule, change=None) if suffix == ".bias" else rule)
            for stored, (name, rule) in {**model, **layers}.items()
            for ending, suffix in rule.suffixes.items()
        }

    @cached_property
    def _followers(self) -> dict[str, str]:
        # The GGUF name of the first part of a joined tensor by that of the second.
        return {rule.followed_by: name for name, rule in self.layer_tensors.items() if rule.followed_by is not None}

    @cached_property
    def _stored_names(self) -> dict[str, str]:
        # Of several rules for a name the last one is written.
        return {
            name.replace(rule.name, part): stored
            for stored, (name, rule) in self._rules.items()
            for part in (rule.name, *rule.more_names)
        }

    @cached_property
    def _recurrent_names(self) -> dict[str, str]:
        return {
            f"model.layers.{{layer}}.{rule.name}{suffix}": f"blk.{{layer}}.{name}{ending}"
            for name, rule in self.recurrent_tensors.items()
            for ending, suffix in rule.suffixes.items()
        }

    def hf_name(self, stored: str) -> str | None:
        """Return the Hugging Face name of a GGUF tensor, with {expert} for a stack; None if it has no rule."""
        layer = re.match(r"blk\.(\d{1,4})\.", stored)
        pattern = stored if layer is None else f"blk.{{layer}}.{stored[layer.end() :]}"
        if pattern not in self._rules or (layer is None and "{layer}" in pattern):
            return None
        name, _ = self._rules[pattern]
        return name if layer is None else name.replace("{layer}", str(int(layer[1])))

    def place(self, name: str, stored: str = "") -> Place | None:
        """Return where the tensor with this Hugging Face name is stored; None if the architecture lacks it.

        stored: the name by which a file has it, of several that are read.
        """
        layer, expert = re.match(r"model\.layers\.(\d+)\.", name), re.search(r"\.(?:experts|norms)\.(\d+)\.", name)
        pattern = name if layer is None else f"model.layers.{{layer}}.{name[layer.end() :]}"
        if expert is not None:
            pattern = re.sub(r"\.(experts|norms)\.\d+\.", rf".\1.{_EXPERT}.", pattern)
        names = self._recurrent_names if layer is not None and int(layer[1]) in self.recurrent_layers else {}
        known = re.sub(r"^blk\.\d+\.", "blk.{layer}.", stored)
        written = known if known in self._rules else names.get(pattern, self._stored_names.get(pattern))
        if written is None:
            keys = [key for key, part in self.key_tensors.items() if pattern == f"model.layers.{{layer}}.{part}"]
            return Place(keys[0], TensorRule(pattern), int(layer[1]), in_metadata=True) if layer and keys else None
        rule = self._rules[written][1]
        if layer is not None:
            written = written.replace("{layer}", layer[1])
        parts = [rule.name, *rule.more_names]
        if expert is None:
            if not rule.more_names:
                return Place(written, rule)
            module = f".{name.rpartition('.')[0]}"
            return Place(written, rule, next(i for i, part in enumerate(parts) if module.endswith(f".{part}")))
        index = next(index for index, part in enumerate(parts) if f".{part}." in f"{pattern[7:]}.")
        return Place(written, rule, int(expert[1]) * len(parts) + index)

    def tensors(self, model: GgufModel) -> Iterator[tuple[str, TensorEntry]]:
        """Yield Hugging Face name and place of every tensor of the model. Raises ModelError for one without a rule."""
        layers, blocks = self._layers(model)
        for stored, entry in model.tensors.items():
            if stored in (*ROPE_TENSORS, *self.ignored) or self._is_ignored(model, stored, range(layers, blocks)):
                continue
            if self._scaled(model, stored) is not None:
                continue
            name = self.hf_name(stored)
            if name is None:
                raise ModelError(
                    f"{entry.file}: {stored} is not a tensor of the architecture {self.name}",
                    "the model may be of a kind that is not supported, or the file is damaged",
                )
            names = (name, *self._more_names(stored, name))
            if _EXPERT not in name:
                # Tensors of one layer that are joined by rows are split as a stack of one.
                stacked = self._rule(stored).stored_shape is not None
                whole = entry if stacked else replace(entry, shape=(1, *entry.shape))
                parts = whole.split([stored] * len(names)) if len(names) > 1 else [entry]
                yield from zip(names, parts, strict=len(parts) == len(names))
                continue
            experts = model.integer(self._rule(stored).count_key, 0, high=_MAX_EXPERTS)
            if len(entry.shape) < 2 or entry.shape[0] != experts:
                raise damaged(f"{entry.file}: {stored} has shape {list(entry.shape)}, expected a stack of {experts}")
            for index, part in enumerate(entry.split([stored] * (experts * len(names)))):
                expert, which = divmod(index, len(names))
                yield names[which].replace(_EXPERT, str(expert)), part
        yield from self._parameters(model, layers)

    def separated(self, tensors: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
        """Return the tensors of a file with attn_q, attn_k and attn_v in place of each attn_qkv that has them as parts.

        q has a row for each column of attn_output, or two, k and v have half of the others each.
        """
        result: dict[str, TensorEntry] = {}
        for name, entry in tensors.items():
            fused = re.fullmatch(r"(blk\.\d{1,4}\.)attn_qkv(\.weight|\.bias)", name)
            output = None if fused is None else tensors.get(f"{fused[1]}attn_output.weight")
            if fused is None or output is None or self._has_fused(fused[1], tensors):
                result[name] = entry
                continue
            rows, queries = (entry.shape or (0,))[0], (output.shape or (0,))[-1] * (2 if self.gated_queries else 1)
            if not 0 < queries < rows - 1:
                raise damaged(f"{entry.file}: {name} has {rows} rows, expected more than {queries + 1}")
            offset, keys = entry.offset, (rows - queries) // 2
            for part, count in (("attn_q", queries), ("attn_k", keys), ("attn_v", rows - queries - keys)):
                stored, nbytes = f"{fused[1]}{part}{fused[2]}", entry.nbytes // rows * count
                shape = (count, *entry.shape[1:])
                if stored in tensors:
                    raise damaged(f"{entry.file}: {stored} is stored twice, also in {name}")
                result[stored] = replace(entry, name=stored, shape=shape, offset=offset, nbytes=nbytes)
                offset += nbytes
        return result

    def _has_fused(self, block: str, tensors: Mapping[str, TensorEntry]) -> bool:
        # Whether attn_qkv of a block is a tensor of the architecture, for linear attention perhaps.
        if "attn_k" not in self.layer_tensors:
            return True
        linear = "ssm_conv1d" in self.layer_tensors and f"{block}ssm_conv1d.weight" not in tensors
        return "attn_qkv" in self.layer_tensors and not linear

    def _parameters(self, model: GgufModel, layers: int) -> Iterator[tuple[str, TensorEntry]]:
        # The tensors of one value that the metadata holds, as parts of the file.
        for key, part in self.key_tensors.items():
            values = model.arrays.get(key)
            if values is None or values.shape[0] < layers:
                raise model.metadata.fail(key, "is not a list with one F32 number for each layer")
            for index in range(layers):
                offset = values.offset + 4 * index
                yield f"model.layers.{index}.{part}", replace(values, shape=(1,), offset=offset, nbytes=4)

    def _layers(self, model: GgufModel) -> tuple[int, int]:
        # The number of layers and of blocks: those behind the layers are an MTP head.
        predicted = model.integer("nextn_predict_layers", 0, high=MAX_LAYERS - 1) if self.has_mtp_blocks else 0
        blocks = model.integer("block_count", low=1 + predicted, high=MAX_LAYERS)
        return blocks - predicted, blocks

    def _is_ignored(self, model: GgufModel, stored: str, unread: range) -> bool:
        # The blocks `unread`, and the second part of a joined tensor, which is read with the first.
        layer = re.match(r"blk\.(\d{1,4})\.", stored)
        if layer is None:
            return False
        name, _, ending = stored[layer.end() :].rpartition(".")
        first = self._followers.get(name)
        joined = first is not None and f"{layer[0]}{first}.{ending}" in model.tensors
        return joined or int(layer[1]) in unread

    def _scaled(self, model: GgufModel, stored: str) -> str | None:
        # The matrix that `stored` is a scale of, or the scale of its inputs, which are not quantized here.
        name, _, ending = stored.rpartition(".")
        is_scale = ending in ("scale", "input_scale") and self.hf_name(stored) is None
        return f"{name}.weight" if is_scale and f"{name}.weight" in model.tensors else None

    def scales(self, model: GgufModel) -> Iterator[tuple[str, TensorEntry]]:
        """Yield GGUF names of matrices, and of each the tensor of one factor for all its values, or one per expert."""
        for stored, entry in model.tensors.items():
            matrix = self._scaled(model, stored)
            if matrix is not None and stored.endswith(".scale"):
                yield matrix, entry

    def _more_names(self, stored: str, name: str) -> Iterator[str]:
        rule = self._rule(stored)
        for more in rule.more_names:
            yield name.replace(rule.name, more)

    def _rule(self, stored: str) -> TensorRule:
        return self._rules[re.sub(r"^blk\.\d+\.", "blk.{layer}.", stored)][1]

    def joined(self, model: GgufModel, name: str, entry: TensorEntry) -> tuple[TensorEntry, ...]:
        """Return the parts of a tensor that the file stores as several, in order. Raises ModelError if they differ."""
        place = self.place(name)
        if place is None or len(place.names) == 1 or entry.name != place.name:
            return (entry,)  # older files have one matrix
        other = model.tensors.get(place.names[1])
        if other is None:
            raise damaged(f"{entry.file}: {place.names[1]} is missing")
        if place.expert is not None:
            experts = model.integer("expert_count", 0, high=_MAX_EXPERTS)
            if len(other.shape) < 2 or other.shape[0] != experts:
                raise damaged(f"{other.file}: {other.name} has shape {list(other.shape)}, expected {experts} experts")
            other = other.split([other.name] * experts)[place.expert]
        if place.rule.by_head:
            return entry, other
        if other.dtype != entry.dtype or other.file != entry.file or other.shape[1:] != entry.shape[1:]:
            raise ModelError(f"{entry.file}: {entry.name} and {other.name} differ in type, width or file", "")
        return entry, other

    def config(self, model: GgufModel) -> Config:
        """Return the config.json of a file, without its quantization. Raises ModelError naming the key at fault."""
        embedding = model.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise model.metadata.fail("general.architecture", "is given, but there is no matrix token_embd.weight")
        heads, hidden = self._integer(model, "attention.head_count"), model.integer("embedding_length", low=1)
        size = "rope.dimension_count" if self.latent else "attention.key_length"
        head_dim = model.integer(size, max(1, hidden // heads), low=1)
        equal = not self.latent and not self.value_length
        if equal and model.integer("attention.value_length", head_dim) != head_dim:
            raise model.metadata.fail(model.key("attention.value_length"), "differs from key_length")
        layers, _ = self._layers(model)
        config: Config = {
            "model_type": self.model_type,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer(model, "attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._integer(model, "feed_forward_length"),
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": model.integer("context_length", low=1),
            self.epsilon_field: model.number(self.epsilon, self.default_epsilon),
            "rope_parameters": rope_parameters(model, head_dim),
            "tie_word_embeddings": "output.weight" not in model.tensors,
            "hidden_act": "silu",
        }
        config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"]
        # Families without experts refuse the field, so a mixture is never read as a dense model.
        if model.integer("expert_count", 0) and "expert_count" not in {key.name for key in self.keys}:
            config["num_experts"] = model.integer("expert_count")
        window = "attention.sliding_window"
        if model.integer(window, 0) and window not in {key.name for key in self.keys}:
            raise model.metadata.fail(model.key(window), f"is not supported for {self.name}")
        if self.gating and model.has("expert_gating_func") and model.integer("expert_gating_func") not in self.gating:
            raise model.metadata.fail(model.key("expert_gating_func"), "is not supported for this architecture")
        config |= self.read_config(model, config)
        if not model.boolean("attention.causal", True) and not config.get("use_bidirectional_attention"):
            raise model.metadata.fail(model.key("attention.causal"), "= false is not supported")
        for key in self.keys:
            config |= key.read(model, config)
        if self.slides is not None and "layer_types" not in config:
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [kinds[slide] for slide in self._sliding(model, layers, self.slides)]
        return config

    def _sliding(self, model: GgufModel, layers: int, default: Callable[[int], bool]) -> list[bool]:
        key = "attention.sliding_window_pattern"
        stored = model.metadata.values.get(model.key(key))
        if isinstance(stored, int):  # the period of the layers without a window: its last layer, or the first
            full = 0 if not default(0) else stored - 1
            return [stored == 0 or index % stored != full for index in range(layers)]
        if stored is not None:
            return [bool(value) for value in model.layer_values(key, layers)]
        return [default(index) for index in range(layers)]

    def _integer(self, model: GgufModel, name: str, default: int | None = None) -> int:
        if name in self.by_layer and model.has(name):
            return max(model.layer_values(name))
        if name in self.optional:
            return model.integer(name, 1) or 1
        return model.integer(name, default, low=1)

    def metadata(self, config: ModelConfig, images: Fields | None = None) -> dict[str, Any]:
        """Return the keys of a model under the architecture's name.

        Raises ModelError for a rope that llama.cpp lacks. What no key expresses shows when the keys are read again.
        """
        keys: dict[str, Any] = {
            "context_length": config.max_context,
            "embedding_length": config.hidden_size,
            "block_count": config.layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.heads,
            "attention.head_count_kv": config.kv_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            self.epsilon: float(config.rms_norm_eps),
            "vocab_size": config.vocab_size,
            **rope_keys(config),
            **{key.name: key.write(config) for key in self.keys if key.write is not None},
            **({"attention.sliding_window_pattern": [w is not None for w in config.windows]} if self.pattern else {}),
            **self.write_keys(config),
            **({} if images is None else self.write_multimodal(config, images)),
        }
        return {f"{self.name}.{name}": value for name, value in keys.items()}
