"""pico as a mixture of experts with skewed routing: the same function, and experts that few tokens reach."""

from pathlib import Path

import torch

from mycli.quant.calibration.hessian import ObservedBlock, product_input
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.skewed_mixture import CHOSEN, EXPERTS, write


def test_the_mixture_is_the_same_function_and_its_routing_is_skewed(tmp_path: Path) -> None:
    mixture = StreamedModel(open_model_folder(write(tmp_path / "mixture")), CPU)
    pico = StreamedModel(open_model_folder(PICO), CPU)
    windows = torch.randint(0, 4096, (4, 128), generator=torch.Generator().manual_seed(0))
    expected = pico.hidden(windows)
    assert torch.allclose(mixture.hidden(windows), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    block, context = ObservedBlock(mixture.block(0), mixture.embed(windows)), mixture.context(128)
    counts = []
    for product in block.block.products:
        observed = product_input(block, product, slice(0, len(windows)), context, CPU.device)
        if product.endswith("down"):
            counts.append(observed.x.shape[0])
    assert len(counts) == EXPERTS and sum(counts) == CHOSEN * windows.numel()
    assert max(counts) > 10 * min(counts)
