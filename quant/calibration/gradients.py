"""Gradients of a loss through a streamed model, of which one layer is in memory at a time."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.layer_streaming import SideInputs, StreamedModel
from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import AttentionSpec

Run = Callable[[Tensor, PassContext], Tensor]


class BackwardPass:
    """Takes a gradient by the residual stream back through the layers of a model, from the last to the first.

    `gradient` fp32 [windows, tokens, width] is that by the output of the layer which comes next.
    """

    # A layer whose keys and values others read gets their gradients too: those layers come later, so they were
    # differentiated before it.

    def __init__(
        self, model: StreamedModel, gradient: Tensor, context: PassContext, side_inputs: SideInputs | None
    ) -> None:
        """side_inputs: with the keys and values that a forward pass over the same windows has left."""
        self.gradient = gradient
        self._device = model.placement.device
        self._context = replace(context, attention=PromptAttention())
        self._side_inputs = side_inputs
        self._shared: dict[tuple[int, int], list[Tensor]] = {}  # gradients by layer and first window

    def through(self, layer: LayerSpec, windows: slice, entering: Tensor, run: Run) -> None:
        """Differentiate `run` of a layer for a batch of windows of its input `entering` [windows, tokens, width].

        The leaves that `run` uses get their gradients, and `gradient` becomes that by `entering`.
        """
        x = entering[windows].to(self._device, copy=True).requires_grad_()
        context, source = self._context, None
        shared: dict[int, tuple[Stored, Stored]] = {}
        if self._side_inputs is not None:
            source = layer.mixer.kv_source if isinstance(layer.mixer, AttentionSpec) else None
            if source is not None:
                stored = self._side_inputs.shared(windows)[source]
                key, value = (Stored(part.dense(x.dtype).detach().requires_grad_()) for part in stored)
                shared[source] = key, value
            context = self._side_inputs.joined(context, windows, shared)
        with reduced_precision(self._device):
            y = run(x, context)
            outputs, slopes = [y], [self.gradient[windows].to(y)]
            if (later := self._shared.pop((layer.index, windows.start), None)) is not None:
                outputs += [part.data for part in shared[layer.index]]
                slopes += later
            torch.autograd.backward(outputs, slopes)
        assert x.grad is not None
        self.gradient[windows] = x.grad.to(self.gradient)
        if source is not None:
            self._add(source, windows, [part.data.grad for part in shared[source]])

    def _add(self, source: int, windows: slice, slopes: list[Tensor | None]) -> None:
        new = [slope for slope in slopes if slope is not None]
        known = self._shared.setdefault((source, windows.start), new)
        if known is not new:
            self._shared[source, windows.start] = [before + slope for before, slope in zip(known, new, strict=True)]
