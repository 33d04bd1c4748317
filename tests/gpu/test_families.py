"""Test models of every family on CUDA against the CPU in fp32, and their passes; run by `make test-gpu`."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mycli.runtime.checkpoint.open_folder import open_model_folder  # noqa: E402  (only where transformers is)
from mycli.runtime.device.placement import Placement  # noqa: E402  (as above)
from mycli.runtime.engine.engine import Engine  # noqa: E402  (as above)
from mycli.runtime.engine.loading.loader import load_model  # noqa: E402  (as above)
from mycli.runtime.errors import Declined  # noqa: E402  (as above)
from mycli.runtime.kernels.paged import KEY_BLOCK  # noqa: E402  (as above)
from mycli.runtime.memory.cache_shape import CacheShape, window_blocks  # noqa: E402  (as above)
from tests.support.engines import contiguous_engine, tokens_of, whole  # noqa: E402  (as above)
from tests.support.families import CASES, QUICK, make  # noqa: E402  (as above)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [1, 30, 31, 32, 5, 17, 40, 12, 8, 44, 2]
# A pass or loop that was compiled, compared and found wrong, or that could not be compiled.
WRONG = {"kernels-failed", "layer-differs", "layer-cache-differs", "logits-differ", "replay-differs"}
WRONG |= {"device-loop-failed", "draw-differs", "greedy-differs"}


@pytest.mark.parametrize("case", sorted(QUICK))
def test_a_family_on_cuda_is_that_on_the_cpu(case: str, tmp_path: Path) -> None:
    try:
        make(tmp_path, *CASES[case])
    except (AttributeError, ImportError, KeyError, ValueError) as error:
        pytest.skip(f"the installed transformers does not have it: {error}")
    told: list[str | Declined] = []
    folder = open_model_folder(tmp_path)
    runners = {
        device: load_model(folder, Placement(torch.device(device), torch.float32), warn=told.append)
        for device in ("cpu", "cuda")
    }
    tokens = torch.randint(3, folder.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    expected, found = (whole(runner.model, tokens.to(runner.device), (20, 1, 3)).cpu() for runner in runners.values())
    assert ((found - expected).norm() / expected.norm()) < 1e-3
    replies = [tokens_of(contiguous_engine(runner, 64), PROMPT, 24) for runner in runners.values()]
    assert replies[0] == replies[1]
    half = load_model(folder, Placement(torch.device("cuda"), torch.bfloat16), warn=told.append)
    assert len(tokens_of(contiguous_engine(half, 64), PROMPT, 24)) == 24
    assert not [one for one in told if isinstance(one, Declined) and one.code in WRONG], told


@pytest.mark.parametrize("case", ["gemma3-window7-tied", "gpt_oss-window7-gqa4:2", "mistral-window7"])
def test_blocks_of_a_window_do_not_change_a_reply(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**changes, "max_position_embeddings": 256})
    runner = load_model(open_model_folder(tmp_path), Placement(torch.device("cuda"), torch.bfloat16))
    replies = []
    for windows in (0, window_blocks(runner.config, 1, 1, 64) or 0):
        shape = CacheShape(192, 3, KEY_BLOCK, windows)
        replies.append(tokens_of(Engine(runner, shape, runner.config.vocab_size, running=1, chunk=64), PROMPT, 150))
    assert replies[0] == replies[1]
