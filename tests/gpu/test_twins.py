"""The kernels' tests in the interpreter once more, compiled and on CUDA: other numbers every time, the same bounds.

There programs run one after the other; here, where a result is asked for twice, a race would show.
"""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.kernels.test_triton_attention import test_attend  # noqa: E402  (only where Triton is)
from tests.runtime.kernels.test_triton_epilogues import test_activate, test_add, test_embed, test_project  # noqa: E402  (as above)
from tests.runtime.kernels.test_triton_linear import (  # noqa: E402  (as above)
    test_bf16_of_any_magnitude,
    test_call_rounds_once_and_repeats_itself,
    test_nan_stays_in_its_row,
    test_no_rows,
    test_product,
)
from tests.runtime.kernels.test_triton_sample import (  # noqa: E402  (as above)
    test_a_draw_depends_on_seed_position_and_sequence_alone,
    test_a_logit_of_minus_infinity_is_never_chosen,
    test_draws_are_distributed_as_softmax,
    test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back,
    test_noise_is_gumbels_and_the_rare_large_values_have_all_their_digits,
    test_the_likeliest_is_torchs_lowest_among_equals,
)
from tests.runtime.kernels.test_triton_top_k_top_p import (  # noqa: E402  (as above)
    test_draws_are_distributed_as_on_the_host,
    test_what_is_kept_is_what_the_host_keeps,
)

__all__ = [
    "test_a_draw_depends_on_seed_position_and_sequence_alone",
    "test_a_logit_of_minus_infinity_is_never_chosen",
    "test_activate",
    "test_add",
    "test_attend",
    "test_bf16_of_any_magnitude",
    "test_call_rounds_once_and_repeats_itself",
    "test_draws_are_distributed_as_on_the_host",
    "test_draws_are_distributed_as_softmax",
    "test_embed",
    "test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back",
    "test_nan_stays_in_its_row",
    "test_no_rows",
    "test_noise_is_gumbels_and_the_rare_large_values_have_all_their_digits",
    "test_product",
    "test_project",
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
