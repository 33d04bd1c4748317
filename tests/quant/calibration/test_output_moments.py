"""The moments of output gradients against those of one graph of the whole model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.calibration import output_moments as module
from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.calibration.output_moments import LayerMoments, moments_name, output_moments, windows_at_once
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.rounding.rows import BLOCK_ROWS, split_rows
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.sampling.sampler import tokens_at
from tests.support.families import CASES, make
from tests.support.models import CPU
from tests.support.paths import DRAFT

STREAM = "stream"
FAMILIES = (
    "mixtral-4top2",
    "smallthinker-rotating-untied",
    "llama4-chunk16-4top1",
    "gemma4-experts-ple-shared-kv-double-untied",
    "gemma3n-sparse-shared-kv",
)


class Added:
    """Multiplies by a dense weight and adds zeros that require gradients."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.zeros = weight, list[Tensor]()

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self._weight)
        self.zeros.append(torch.zeros_like(y, requires_grad=True))
        return y + self.zeros[-1]

    def dequantize(self) -> Tensor:
        return self._weight


def slopes(model: StreamedModel, windows: Tensor, seed: int) -> list[dict[str, Tensor]]:
    """Return the gradients [rows, N] by layer and product, and of streams, in one graph of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    windows = windows[torch.randperm(len(windows), generator=generator)]
    zeros: list[dict[str, Tensor]] = []
    x = model.embed(windows).requires_grad_()
    context, side_inputs = model.context(windows.shape[1], exact=True), model.side_inputs(windows)
    if side_inputs is not None:
        context = side_inputs.add_to(context, slice(0, len(windows)))
    for index in range(model.config.layers):
        block = model.block(index)
        products = {product: Added(linear.weight()) for product, linear in block.products.items()}
        for product, linear in block.products.items():
            linear.replace(products[product])
        x = block(x, context)
        stream = torch.zeros_like(x, requires_grad=True)
        x = x + stream
        added = {product: matmul.zeros[0] for product, matmul in products.items() if matmul.zeros}
        zeros.append({**added, STREAM: stream})
    total = torch.zeros(())
    for stream in x:
        scores = model.logits(stream).log_softmax(1)
        shares = torch.rand(len(scores), generator=generator).tolist()
        drawn = tokens_at(scores.detach().exp(), shares)
        total = total + scores.gather(1, drawn).sum()
    total.backward()  # type: ignore[no-untyped-call]  # torch's stub
    return [{product: zero.grad.flatten(0, -2) for product, zero in added.items()} for added in zeros]


@pytest.fixture(params=["dense", *FAMILIES])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "dense":
        return DRAFT
    make(tmp_path / "model", *CASES[request.param])
    return tmp_path / "model"


@pytest.mark.usefixtures("quick_configs")
def test_moments_are_those_of_the_whole_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a block hold fewer windows than are drawn; experts count the tokens that reach them.

    Layers that read the keys and values of another one add to its gradients.
    """
    model = StreamedModel(open_model_folder(folder), CPU, 2 * 24, dense=True)
    windows = torch.randint(0, model.config.vocab_size, (5, 24), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        # Draws follow exact scores: a token drawn differently would change everything.
        for name in ("output_moments", "gradients"):
            patch.setattr(f"mycli.quant.calibration.{name}.reduced_precision", lambda _: torch.enable_grad())
        reports: list[tuple[int, int]] = []
        whole = output_moments(model, windows, 3, lambda _, done, total: reports.append((done, total)))
    assert reports[-1] == (2 * model.config.layers,) * 2
    for layer, expected in zip(whole, slopes(model, windows, 3), strict=True):
        assert layer.stream is not None
        found = {**layer.products, STREAM: layer.stream}
        sums = dict[str, Tensor]()
        for product, gradients in expected.items():
            rows, name = split_rows(gradients.T), moments_name(product)
            sums[name] = sums.get(name, torch.zeros(())) + rows @ rows.transpose(1, 2)
        assert found.keys() == sums.keys()
        for product, wanted in sums.items():
            assert torch.allclose(found[product], wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())), product


def test_sums_of_several_batches_have_blocks_of_rows() -> None:
    """Neither tokens nor rows are a multiple of a block's."""
    moments, generator = LayerMoments(), torch.Generator().manual_seed(0)
    batches = [torch.randn(2, tokens, BLOCK_ROWS + 44, generator=generator) for tokens in (5, 32, 33)]
    for batch in batches:
        moments.add(batch, "qkv")
    rows = split_rows(torch.cat([batch.flatten(0, 1) for batch in batches]).T.double())
    torch.testing.assert_close(moments.products["qkv"].double(), rows @ rows.transpose(1, 2), rtol=1e-4, atol=1e-3)


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
