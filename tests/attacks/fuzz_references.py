"""Computes logits of a damaged model with slow, independent readers, to find files that are read differently.

A GGUF file is parsed and decoded by the `gguf` package and written anew by it as F32, which is run product by product:
offsets, types, blocks and packed products of the damaged file are compared, not the meaning of its keys. A folder is
read by transformers, and so is its config.

A difference does not count where fp32 decides it: the reference moves as far when its own weights change in the last
bits (scores of 1e18 choose one key or another), or its activations are so large that the squares in a norm overflow.
Nor does it count if loading warned of it.
"""

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.layers.transformer import Transformer
from tests.support.engines import whole
from tests.support.models import CPU

BOUND = 1e-3  # relative to the largest logit; both are fp32
_NOISE = 2.0**-22  # relative, of the weights of a reference: two units in the last place
_TRIES = 3
_SQUARABLE = 1.8e19  # the square of more overflows in fp32


class NoReferenceError(Exception):
    """The other reader refuses the model."""


class SilentDifferenceError(Exception):
    """The model was read, with other logits than the reference."""


def exact_logits(opened: ModelFolder) -> Tensor | None:
    """Return the logits of a few tokens in fp32; None for a model without."""
    model = load_model(replace(opened, config=replace(opened.config, dtype="float32")), CPU)
    return whole(model.model, tokens(opened.config.vocab_size)) if isinstance(model.model, Transformer) else None


def tokens(vocabulary: int) -> Tensor:
    return torch.arange(8)[None] * 7 % vocabulary


def compare(path: Path) -> None:
    """Raise SilentDifferenceError or NoReferenceError for a model that was read: a GGUF file or a folder."""
    opened = open_model_folder(path)
    actual = exact_logits(opened)
    if actual is None:
        return
    inputs = tokens(opened.config.vocab_size)
    reference = _reference(path, inputs)
    expected = reference.logits
    if actual.shape != expected.shape:
        raise SilentDifferenceError(f"logits of shape {list(actual.shape)}, expected {list(expected.shape)}")
    if not bool(expected.isfinite().all()):
        # Where sums overflow depends on their order; a finite result beside an infinite one is still suspicious.
        if bool(actual.isfinite().all()) and bool(expected.isnan().all()):
            raise SilentDifferenceError("finite logits, expected none")
        return
    difference = _distance(actual, expected)
    if difference <= BOUND:
        return
    if not reference.largest <= _SQUARABLE:
        raise NoReferenceError("the squares of its activations overflow")
    moved = max(_distance(_reference(path, inputs, seed).logits, expected) for seed in range(1, _TRIES + 1))
    if moved * _TRIES >= difference:
        raise NoReferenceError("its logits depend on the last bits of its weights")
    raise SilentDifferenceError(f"logits differ by {difference:.2g} of the largest")


@dataclass(frozen=True)
class Reference:
    """The logits of the other reader. largest: the largest activation, 0 if it was not observed."""

    logits: Tensor
    largest: float = 0.0


def _distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def _reference(path: Path, inputs: Tensor, noise: int = 0) -> Reference:
    """Return the logits of the other reader; noise: seed of a change of the last bits of its weights, 0 for none."""
    read = _gguf_logits if path.is_file() else _transformers_logits
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return read(path, inputs, noise)
    except NoReferenceError:
        raise
    except Exception as error:  # whatever it is, it was not read
        raise NoReferenceError(f"{type(error).__name__}: {error!s:.200}") from error


def _noisy(values: Tensor, noise: int) -> Tensor:
    generator = torch.Generator().manual_seed(noise)
    return values * (1 + _NOISE * (2 * torch.rand(values.shape, generator=generator) - 1))


def _gguf_logits(path: Path, inputs: Tensor, noise: int) -> Reference:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.gguf"
        _rewrite(path, plain, noise)
        logits = exact_logits(open_model_folder(plain))
    assert logits is not None
    return Reference(logits)


def _rewrite(source: Path, target: Path, noise: int) -> None:
    """Write all keys and the decoded tensors of a file to another one, with the `gguf` package alone."""
    logging.disable(logging.WARNING)
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *rest = field.types
        if kind == gguf.GGUFValueType.ARRAY and not field.data:
            raise NoReferenceError("an empty array")  # which the package does not write
        writer.add_key_value(name, field.contents(), kind, rest[-1] if rest else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if noise:
            values = _noisy(torch.from_numpy(values), noise).numpy()
        writer.add_tensor(tensor.name, values.reshape([int(size) for size in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _transformers_logits(path: Path, inputs: Tensor, noise: int) -> Reference:
    transformers.logging.set_verbosity(50)
    warnings.simplefilter("ignore")
    load: Callable[..., Any] = transformers.AutoModelForImageTextToText.from_pretrained
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, info = load(path, **options)
    lacking = {kind: sorted(map(str, info[kind]))[:3] for kind in ("missing_keys", "mismatched_keys") if info.get(kind)}
    if any(_is_text(name) for names in lacking.values() for name in names):
        raise NoReferenceError(f"random weights: {lacking}")
    places = {getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}
    if places & set(inputs.flatten().tolist()):
        raise NoReferenceError("a token is the place of an image")  # Gemma 4 computes padding there
    largest = [0.0]

    def note(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            largest.append(output.abs().max().item())

    for module in model.modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.copy_(_noisy(parameter, noise))
        logits: Tensor = model.eval()(input_ids=inputs).logits
    return Reference(logits, max(largest))


def _is_text(name: str) -> bool:
    return not any(part in name for part in ("vision", "visual", "projector"))
