"""Checks the tensors of a folder against its config, from headers and a few bytes, before any memory is taken.

Imports no torch.
"""

from collections.abc import Mapping, Sequence

from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.manifest import Manifest, listed_names
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS

_IGNORED = ("rotary_emb.inv_freq",)  # computed from the config; old checkpoints store them too
_BIAS = (".bias", "a bias where config.json has none", "config.json and the weights belong to different models")


def check_tensors(manifest: Manifest, config: ModelConfig, packings: Mapping[str, Packing]) -> None:
    """Check that every tensor of `config` and `packings` is present with its exact shape, and no other.

    A layout says which tensors replace a packed weight and which it may hold besides. Stored rotary frequencies and the
    `lm_head.weight` of a tied head are accepted. Raises ModelError naming the first tensors at fault.
    """
    tensors = manifest.tensors
    expected = {name: (shape, dtypes) for name, shape, dtypes in formats.expected_tensors(config, packings, tensors)}
    if config.tie_embeddings and "lm_head.weight" in tensors:
        expected["lm_head.weight"] = ((config.vocab_size, config.hidden_size), SAFETENSORS_FLOATS)
    ignored = (*_IGNORED, *formats.ignored_suffixes(packings))
    unexpected = [name for name in tensors if name not in expected and not name.endswith(ignored)]
    if unexpected:
        raise _unexpected(unexpected, packings)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise _missing(missing)
    for name, (shape, dtypes) in expected.items():
        entry = tensors[name]
        if entry.shape != shape:
            raise _wrong_shape(entry, shape)
        if entry.dtype not in dtypes:
            raise damaged(f"{entry.file}: {name} is {entry.dtype}, expected {' or '.join(dtypes)}")
    _check_fused(tensors, config, packings)
    for linear in formats.quantizable(config):
        if (packing := packings.get(linear.name)) is not None:
            formats.load(packing.layout).check(linear, packing, manifest)


def _check_fused(tensors: Mapping[str, TensorEntry], config: ModelConfig, packings: Mapping[str, Packing]) -> None:
    # Dense linears that share an input become one product, so their weights must have one dtype.
    for layer in range(config.layers):
        for linears in config.layer(layer).products().values():
            names = [f"{linear.name}.weight" for linear in linears if linear.name not in packings]
            for other in (tensors[name] for name in names[1:]):
                first = tensors[names[0]]
                if other.dtype != first.dtype:
                    raise ModelError(
                        f"{other.file}: {other.name} is {other.dtype}, but {first.name} is {first.dtype}",
                        "layers that share their input must be stored in one dtype",
                    )


def _unexpected(names: Sequence[str], packings: Mapping[str, Packing]) -> ModelError:
    # Among unexpected tensors, those that show what config.json lacks come first.
    dense = [name for name in names if name.removesuffix(".weight") in packings]
    if dense:
        return ModelError(
            f"{listed_names(dense)}: not quantized, but quantization_config covers it", "list it in its ignore"
        )
    for suffix, problem, hint in (*formats.unexpected_suffixes(packings), _BIAS):
        matching = [name for name in names if name.endswith(suffix)]
        if matching:
            return ModelError(f"{listed_names(matching)}: {problem}", hint)
    return damaged(f"{listed_names(names)}: not part of the model that config.json describes")


def _missing(names: Sequence[str]) -> ModelError:
    problem = f"{listed_names(names)}: missing, but config.json describes a model that has it"
    if names == ["lm_head.weight"]:
        return ModelError(problem, "if the model ties its embeddings, config.json must say so: tie_word_embeddings")
    return damaged(problem)


def _wrong_shape(entry: TensorEntry, shape: Shape) -> ModelError:
    hint = "config.json and the weights belong to different models, or the file is damaged"
    if entry.name in ("model.embed_tokens.weight", "lm_head.weight") and entry.shape[1:] == shape[1:]:
        # Rows beyond the tokenizer's ids are padding and legal; rows beyond vocab_size are a contradiction.
        hint = f"vocab_size must be the number of rows, {entry.shape[0]}, of which the tokenizer may use fewer"
    return ModelError(f"{entry.file}: {entry.name} has shape {list(entry.shape)}, expected {list(shape)}", hint)
