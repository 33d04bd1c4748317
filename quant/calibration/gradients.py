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

Run = Callable[[Tensor, PassContext], Tensor]


class BackwardPass:
    """Backpropagates through the layers of a model, from the last to the first.

    `gradient` fp32 [windows, tokens, width] is the gradient by the output of the layer that is differentiated next.
    """

    def __init__(
        self, model: StreamedModel, gradient: Tensor, context: PassContext, side_inputs: SideInputs | None
    ) -> None:
        """side_inputs: holds the keys and values of a forward pass over the same windows."""
        self.gradient = gradient
        self._device, self._dtype = model.placement.device, model.placement.dtype
        self._context = replace(context, attention=PromptAttention())
        self._side_inputs = side_inputs
        # Keys and values by their layer and first window. The layers that read them come later in the model, so their
        # gradients are complete when that layer is differentiated.
        self._read: dict[tuple[int, int], tuple[Stored, Stored]] = {}

    def through(self, layer: LayerSpec, windows: slice, entering: Tensor, run: Run) -> None:
        """Differentiate `run` of a layer for a batch of windows of its input `entering` [windows, tokens, width].

        The leaves that `run` uses get their gradients, and `gradient` becomes the gradient by `entering`.
        """
        x = entering[windows].to(self._device, copy=True).requires_grad_()
        context, shared = self._context, dict[int, tuple[Stored, Stored]]()
        if self._side_inputs is not None:
            if layer.kv_source is not None:
                shared[layer.kv_source] = self._leaves(layer.kv_source, windows, self._side_inputs)
            context = self._side_inputs.joined(context, windows, shared)
        with reduced_precision(self._device):
            y = run(x, context)
            outputs, slopes = [y], [self.gradient[windows].to(y)]
            if (read := self._read.pop((layer.index, windows.start), None)) is not None:
                outputs += [part.data for part in shared[layer.index]]
                slopes += [part.data.grad for part in read if part.data.grad is not None]
            torch.autograd.backward(outputs, slopes)
        assert x.grad is not None
        self.gradient[windows] = x.grad.to(self.gradient)

    def _leaves(self, layer: int, windows: slice, side_inputs: SideInputs) -> tuple[Stored, Stored]:
        place = layer, windows.start
        if place not in self._read:
            stored = side_inputs.shared(windows)[layer]
            key, value = (Stored(part.dense(self._dtype).detach().requires_grad_()) for part in stored)
            self._read[place] = key, value
        return self._read[place]
