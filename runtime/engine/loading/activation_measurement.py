"""Measures how far 8-bit activations move the predictions of a loaded model, for files without a card."""

from collections.abc import Sequence
from importlib import resources

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import UserError
from mycli.runtime.hub.activation_record import record_kl
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.quantization.activations import ActivationChoice, choose_by_file
from mycli.runtime.quantization.low_rank import stored_product
from mycli.runtime.quantization.scheme import ActivationBits

MEASURED_TOKENS = 192  # of the bundled text: enough for a mean within a fifth, and read in a second by a model of 1 B
_ROWS = 64  # in a pass: their logits exist in fp32, several times


def measure_choice(folder: ModelFolder, model: Transformer, kv: KvDtype) -> ActivationChoice:
    """Choose the activations of `model`, loaded with 16 bits, set them, and record the measurement.

    They stay as they are if the tokenizer or the model cannot read the text.
    """
    text = (resources.files("mycli.runtime") / "pico" / "held-out.txt").read_text(encoding="utf-8")
    try:
        tokens = folder.tokenizer().encode(text[: 16 * MEASURED_TOKENS], add_special=True)[:MEASURED_TOKENS]
        kl = _moved_kl(model, kv, tokens)
    except UserError:  # it is reported where the model is used
        kl = None
    if kl is not None:
        record_kl(folder.path, kl)
    choice = choose_by_file(kl)
    _round_activations(model, choice.bits)
    return choice


def _round_activations(model: Transformer, bits: ActivationBits) -> None:
    for module in model.modules():
        for matmul in module.matmuls if isinstance(module, Linear) else ():
            if isinstance(product := stored_product(matmul), CpuMatmul):
                product.round_activations(bits)


def _moved_kl(model: Transformer, kv: KvDtype, tokens: Sequence[int]) -> float | None:
    # None if logits are not finite.
    runner = ModelRunner(model, kv)
    caches = {bits: runner.make_cache(CacheShape.contiguous(len(tokens))) for bits in (16, 8)}
    total = torch.zeros(())

    def read(bits: ActivationBits, start: int) -> Tensor:
        _round_activations(model, bits)
        part = tokens[start : start + _ROWS]
        return runner.run([Chunk(part, start, (0,), len(part))], caches[bits]).log_softmax(1)

    for start in range(0, len(tokens), _ROWS):
        sixteen, eight = read(16, start), read(8, start)
        total += ((sixteen - eight) * sixteen.exp()).sum()
    return max(0.0, float(total) / len(tokens)) if torch.isfinite(total) else None
