"""Test both CPU implementations of expert routing against transformers' routers."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Ernie4_5_MoeConfig, Glm4MoeConfig, Lfm2MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from mycli.runtime.errors import Declined
from mycli.runtime.kernels import reference
from mycli.runtime.kernels.cpu.experts import native_route
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.kernels.routed import Route
from mycli.runtime.models.experts_spec import RoutingSpec, ScoringName

EXPERTS, TOKENS = 24, 50
ROUTES = {"plain": reference.route, "native": native_route}
Router = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # from scores and a correction: chosen experts and weights


def _loaded(router: nn.Module) -> nn.Module:
    router.load_state_dict({"weight": torch.eye(EXPERTS)}, strict=False)
    return router


def glm(choice: RoutingSpec) -> Router:
    config = Glm4MoeConfig(
        hidden_size=EXPERTS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=choice.top_k,
        norm_topk_prob=choice.normalize,
        routed_scaling_factor=choice.scale,
        n_group=choice.groups,
        topk_group=choice.top_groups,
    )

    def routed(scores: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        router = _loaded(Glm4MoeTopkRouter(config))
        router.e_score_correction_bias.copy_(correction)
        _, weights, chosen = router(scores)
        return chosen, weights

    return routed


def ernie(choice: RoutingSpec) -> Router:
    config = Ernie4_5_MoeConfig(
        hidden_size=EXPERTS, moe_num_experts=EXPERTS, moe_k=choice.top_k, moe_norm_min=choice.epsilon
    )

    def routed(scores: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        router = _loaded(Ernie4_5_MoeTopKRouter(config))
        router.moe_statics.e_score_correction_bias.data.copy_(correction)
        _, weights, chosen = router(scores)
        return chosen, weights

    return routed


def lfm(choice: RoutingSpec) -> Router:
    config = Lfm2MoeConfig(
        hidden_size=EXPERTS,
        num_experts=EXPERTS,
        num_experts_per_tok=choice.top_k,
        norm_topk_prob=choice.normalize,
        routed_scaling_factor=choice.scale,
    )

    def routed(scores: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, chosen = _loaded(Lfm2MoeTopKRouter(config))(scores, correction)
        return chosen, weights

    return routed


CHOICES: dict[str, tuple[Callable[[RoutingSpec], Router], RoutingSpec]] = {
    "glm": (glm, RoutingSpec(5, normalize=True, scoring="sigmoid", epsilon=1e-20, scale=2.5)),
    "glm-as-they-are": (glm, RoutingSpec(3, normalize=False, scoring="sigmoid")),
    "glm-groups": (glm, RoutingSpec(6, normalize=True, scoring="sigmoid", groups=4, top_groups=2)),
    "glm-one-group-of-many": (glm, RoutingSpec(2, normalize=True, scoring="sigmoid", groups=12, top_groups=1)),
    "ernie": (ernie, RoutingSpec(4, normalize=True, epsilon=1e-12)),
    "lfm": (lfm, RoutingSpec(4, normalize=True, scoring="sigmoid", epsilon=1e-6)),
}


@pytest.mark.parametrize("code", ROUTES)
@pytest.mark.parametrize("case", CHOICES)
def test_tokens_go_where_transformers_sends_them(case: str, code: str) -> None:
    """The weights are equal too, for scores of any size; the correction decides for most tokens."""
    if code == "native" and isinstance(native(), Declined):
        pytest.skip(f"no native code here: {native()}")
    theirs, choice = CHOICES[case]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(TOKENS, EXPERTS, generator=generator) * torch.logspace(-2, 1, TOKENS).unsqueeze(1)
    correction = torch.randn(EXPERTS, generator=generator) / 4
    chosen, weights = theirs(choice)(scores, correction)
    route = ROUTES[code](scores, choice, correction)
    assert isinstance(route, Route)
    experts = torch.tensor(route.hit).repeat_interleave(route.starts.diff())[route.places.long()]
    found, wanted = torch.zeros(2, TOKENS, EXPERTS).unbind()
    found.scatter_(1, experts, route.weights)
    wanted.scatter_(1, chosen, weights.detach())
    assert torch.equal(experts.sort().values, chosen.sort().values)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-7)
    uncorrected = reference.route(scores, choice)
    assert not torch.equal(uncorrected.tokens, route.tokens)


@pytest.mark.parametrize("code", ROUTES)
@pytest.mark.parametrize("groups", [1, 4], ids=["whole", "groups"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_margin_and_a_factor_are_of_the_weights(scores: ScoringName, groups: int, code: str) -> None:
    """The margin and factor exceed those of real families to be visible; the chosen experts stay the same."""
    if code == "native" and isinstance(native(), Declined):
        pytest.skip(f"no native code here: {native()}")
    given = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2))
    values = given.softmax(-1) if scores == "softmax" else given.sigmoid()
    usual = RoutingSpec(3, normalize=True, scoring=scores, groups=groups, top_groups=2)
    plain = reference.route(given, replace(usual, normalize=False))
    route = ROUTES[code](given, replace(usual, epsilon=0.5, scale=3.0), None)
    assert isinstance(route, Route)
    assert torch.equal(route.tokens, plain.tokens) and torch.equal(route.places, plain.places)
    sums = plain.weights.sum(-1, keepdim=True)
    torch.testing.assert_close(route.weights, 3.0 * plain.weights / (sums + 0.5))
    experts = torch.tensor(plain.hit).repeat_interleave(plain.starts.diff())[plain.places.long()]
    torch.testing.assert_close(plain.weights, values.gather(1, experts))


@pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_what_is_no_number_stays_within_the_experts(bad: float) -> None:
    """The scores or the correction contain NaN; a token's experts stay distinct and other tokens are unaffected."""
    choice = RoutingSpec(6, normalize=True, scoring="sigmoid", groups=4, top_groups=2)
    scores = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    damaged, correction = scores.clone(), torch.zeros(EXPERTS)
    damaged[3], damaged[4, 2], correction[5] = bad, bad, bad
    for given, added in ((damaged, None), (scores, correction), (damaged, correction)):
        route = native_route(given, choice, added)
        assert isinstance(route, Route)
        assert route.tokens.sort().values.tolist() == sorted(list(range(TOKENS)) * 6)
        assert sorted(route.places.flatten().tolist()) == list(range(6 * TOKENS))
    untouched = native_route(scores[5:], choice)
    route = native_route(damaged, choice)
    assert isinstance(untouched, Route) and isinstance(route, Route)
    assert torch.equal(untouched.weights, route.weights[5:])
