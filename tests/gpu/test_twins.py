"""The interpreter's kernel tests, compiled and on CUDA: new random numbers in every run, the same bounds.

The interpreter runs programs one after the other; here, a test that runs a kernel twice can show a race.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.kernels.test_triton_linear import test_no_rows  # noqa: E402  (only where Triton is)
from tests.runtime.kernels.test_triton_sample import (  # noqa: E402  (as above)
    test_a_logit_of_minus_infinity_is_never_chosen,
    test_chosen_tokens_are_counted_for_the_next_step,
    test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back,
    test_the_likeliest_is_torchs_lowest_among_equals,
)
from tests.runtime.kernels.test_triton_top_k_top_p import test_what_is_kept_is_what_the_host_keeps  # noqa: E402  (as above)
from tests.support.compiled_tests import *  # noqa: E402, F403  (as above; all of its tests)

__all__ = [
    "test_a_logit_of_minus_infinity_is_never_chosen",
    "test_chosen_tokens_are_counted_for_the_next_step",
    "test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back",
    "test_no_rows",
    "test_the_likeliest_is_torchs_lowest_among_equals",
    "test_what_is_kept_is_what_the_host_keeps",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def interpret() -> Callable[..., object]:
    """Replace the fixture of `tests.support.triton_interpreter`: the function runs on the GPU."""

    def run(function: Callable[..., object], *arguments: object) -> object:
        with torch.device("cuda"):
            return function(*arguments)

    return run
