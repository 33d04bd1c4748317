"""Lists the kernel tests that also run compiled: from their PTX (`tests/ptx`) and on a GPU (`tests/gpu`).

Both import all names and define their own `interpret`.
"""

from tests.runtime.kernels.test_triton_attention import test_attend, test_attend_with_softcap_and_sinks
from tests.runtime.kernels.test_triton_dense import test_an_mlp_of_dense_products
from tests.runtime.kernels.test_triton_epilogues import test_activate, test_add, test_embed, test_project
from tests.runtime.kernels.test_triton_experts import (
    test_choices_of_experts,
    test_products_of_experts,
    test_routes,
    test_weighted_sums,
)
from tests.runtime.kernels.test_triton_integer_tables import (
    test_tables_of_integers_are_multiplied_as_int8_is_from_half_the_codes,
)
from tests.runtime.kernels.test_triton_latent import test_latent_attention
from tests.runtime.kernels.test_triton_linear import (
    test_bf16_of_any_magnitude,
    test_call_rounds_once_and_repeats_itself,
    test_groups_of_16,
    test_nan_stays_in_its_row,
    test_product,
    test_product_of_foreign_layouts,
)
from tests.runtime.kernels.test_triton_mixture import (
    test_clamped_gates_of_experts,
    test_gates_of_experts,
    test_scores_of_a_router,
    test_what_experts_make_is_added,
)
from tests.runtime.kernels.test_triton_prompt_attention import test_attend_prompt
from tests.runtime.kernels.test_triton_recurrent import test_convolutions, test_delta_rules, test_scans
from tests.runtime.kernels.test_triton_sample import (
    test_a_logit_of_minus_infinity_is_never_chosen,
    test_chosen_tokens_are_counted_for_the_next_step,
    test_draws_are_the_hosts,
    test_the_likeliest_is_torchs_lowest_among_equals,
)
from tests.runtime.kernels.test_triton_top_k_top_p import test_what_is_kept_is_what_the_host_keeps

__all__ = [
    "test_a_logit_of_minus_infinity_is_never_chosen",
    "test_activate",
    "test_add",
    "test_an_mlp_of_dense_products",
    "test_attend",
    "test_attend_prompt",
    "test_attend_with_softcap_and_sinks",
    "test_bf16_of_any_magnitude",
    "test_call_rounds_once_and_repeats_itself",
    "test_choices_of_experts",
    "test_clamped_gates_of_experts",
    "test_chosen_tokens_are_counted_for_the_next_step",
    "test_convolutions",
    "test_delta_rules",
    "test_draws_are_the_hosts",
    "test_embed",
    "test_gates_of_experts",
    "test_groups_of_16",
    "test_latent_attention",
    "test_nan_stays_in_its_row",
    "test_product",
    "test_product_of_foreign_layouts",
    "test_products_of_experts",
    "test_project",
    "test_routes",
    "test_scans",
    "test_scores_of_a_router",
    "test_tables_of_integers_are_multiplied_as_int8_is_from_half_the_codes",
    "test_the_likeliest_is_torchs_lowest_among_equals",
    "test_weighted_sums",
    "test_what_experts_make_is_added",
    "test_what_is_kept_is_what_the_host_keeps",
]
