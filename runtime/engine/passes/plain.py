"""The plain pass: layer by layer, product by product. It takes everything and is what the others are compared with."""

from collections.abc import Iterator

from torch import Tensor

from mycli.runtime.cache.batch import Batch
from mycli.runtime.engine.passes.base import PassInput, TokenSteps
from mycli.runtime.errors import Declined
from mycli.runtime.layers.transformer import Transformer

_HOST_SAMPLING = Declined("host-sampling")


class PlainPass:
    """Runs the modules of a model as they are."""

    name = "plain"
    samples = False

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def takes(self, work: PassInput) -> Declined | None:
        return None if work.sampling is None else _HOST_SAMPLING

    def logits(self, work: PassInput) -> Tensor:
        batch = Batch.of(work.chunks, work.cache.block_size, self._model.device)
        logits: Tensor = self._model(batch, work.rope, work.cache, work.hook)
        return logits

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        raise NotImplementedError("the plain pass computes logits")
