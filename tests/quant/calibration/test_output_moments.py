"""The moments of output gradients against those of one graph of the whole model."""

import pytest
import torch
from torch import Tensor

from mycli.quant.calibration import output_moments as module
from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.calibration.output_moments import output_moments, windows_at_once
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.rounding.rows import split_rows
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.models import CPU
from tests.support.paths import DRAFT

STREAM = "stream"


def slopes(model: StreamedModel, windows: Tensor, seed: int) -> list[dict[str, Tensor]]:
    """Return the gradients [tokens, N] by layer and product, and of streams: zeros are added and differentiated."""
    generator = torch.Generator().manual_seed(seed)
    windows = windows[torch.randperm(len(windows), generator=generator)]
    zeros: list[dict[str, Tensor]] = []
    x = model.embed(windows)
    for index in range(model.config.layers):
        block, added = model.block(index), {}
        for product, linear in block.products.items():
            zero = added[product] = torch.zeros(*windows.shape, linear.out_features, requires_grad=True)
            linear.register_forward_hook(lambda _, __, output, zero=zero: output + zero)
        x = block(x, model.context(windows.shape[1], exact=True))
        zero = added[STREAM] = torch.zeros_like(x, requires_grad=True)
        x = x + zero
        zeros.append(added)
    total = torch.zeros(())
    for stream in x:
        scores = model.logits(stream).log_softmax(1)
        drawn = torch.multinomial(scores.detach().exp(), 1, generator=generator)
        total = total + scores.gather(1, drawn).sum()
    total.backward()  # type: ignore[no-untyped-call]  # torch's stub
    return [{product: zero.grad.flatten(0, 1) for product, zero in added.items()} for added in zeros]


def test_moments_are_those_of_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk of windows and in several; batches of a block hold fewer windows than a chunk."""
    model = StreamedModel(open_model_folder(DRAFT), CPU, 2 * 24, dense=True)
    windows = torch.randint(0, 4096, (5, 24), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        # Draws follow exact scores: a token drawn differently would change everything.
        patch.setattr(module, "reduced_precision", lambda _: torch.enable_grad())
        reports: list[tuple[int, int]] = []
        whole = output_moments(model, windows, 3, lambda _, done, total: reports.append((done, total)))
    assert reports[-1] == (2 * model.config.layers,) * 2
    for layer, expected in zip(whole, slopes(model, windows, 3), strict=True):
        assert layer.stream is not None
        found = {**layer.products, STREAM: layer.stream}
        assert found.keys() == expected.keys()
        for product, gradients in expected.items():
            rows = split_rows(gradients.T)
            wanted = rows @ rows.transpose(1, 2)
            assert torch.allclose(found[product], wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())), product


def test_few_windows_are_read_and_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamedModel(open_model_folder(DRAFT), CPU, dense=True)
    windows = torch.randint(0, 4096, (6, 16), generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []
    embed = StreamedModel.embed

    def watched(self: StreamedModel, tokens: Tensor) -> Tensor:
        sizes.append(len(tokens))
        return embed(self, tokens)

    monkeypatch.setattr(StreamedModel, "embed", watched)
    monkeypatch.setattr(module, "GRADIENT_WINDOWS", 5)
    monkeypatch.setattr(module, "STREAM_BYTES", 2 * 4 * 16 * model.config.hidden_size * (model.config.layers + 2))
    with reduced_precision(CPU.device):
        output_moments(model, windows, 0)
    assert sizes == [2, 2, 1]
    assert windows_at_once(5, 16, 1 << 30, 2) == 1
