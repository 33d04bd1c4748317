"""The kernels' tests in the interpreter once more, compiled and on CUDA: other numbers every time, the same bounds.

There programs run one after the other; here, where a result is asked for twice, a race would show.
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
    """What `tests.support.triton_interpreter` gives: here the function runs on the GPU."""

    def run(function: Callable[..., object], *arguments: object) -> object:
        with torch.device("cuda"):
            return function(*arguments)

    return run
