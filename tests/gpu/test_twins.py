"""The kernels' tests in the interpreter once more, compiled and on CUDA: other numbers every time, the same bounds.

There programs run one after the other; here, where a result is asked for twice, a race would show.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.kernels.test_triton_linear import test_no_rows  # noqa: E402  (only where Triton is)
from tests.runtime.kernels.test_triton_sample import (  # noqa: E402  (as above)
    test_a_draw_depends_on_seed_position_and_sequence_alone,
    test_draws_are_distributed_as_softmax,
    test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back,
    test_noise_is_gumbels_and_the_rare_large_values_have_all_their_digits,
)
from tests.runtime.kernels.test_triton_top_k_top_p import test_draws_are_distributed_as_on_the_host  # noqa: E402  (as above)
from tests.support.compiled_tests import *  # noqa: E402, F403  (as above; all of its tests)

__all__ = [
    "test_a_draw_depends_on_seed_position_and_sequence_alone",
    "test_draws_are_distributed_as_on_the_host",
    "test_draws_are_distributed_as_softmax",
    "test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back",
    "test_no_rows",
    "test_noise_is_gumbels_and_the_rare_large_values_have_all_their_digits",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def interpret() -> Callable[..., object]:
    """What `tests.support.triton_interpreter` gives: here the function runs on the GPU."""

    def run(function: Callable[..., object], *arguments: object) -> object:
        with torch.device("cuda"):
            return function(*arguments)

    return run
