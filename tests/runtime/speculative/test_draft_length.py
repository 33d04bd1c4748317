"""Test the draft length policy on a simulated machine: never much slower than plain decoding, near the optimum."""

import random
from collections.abc import Callable

import pytest

from mycli.runtime.memory.graphs import DRAFT_BUCKETS, decode_shapes, padded_tokens
from mycli.runtime.speculative.draft_length import (
    FIRST_COOLDOWN,
    FREE_LAG,
    LENGTHS,
    LONG_LENGTHS,
    LONGEST_COOLDOWN,
    MIN_GAIN,
    PASS_COST,
    PLAIN_STEPS,
    PRIOR_ACCEPTANCE,
    READ_COST,
    REFRESH,
    START_BUDGET,
    TOKEN_COST,
    AdaptiveDraftLength,
    DraftLengthPolicy,
    FixedDraftLength,
    draft_lengths,
    expected_tokens,
)

STEP = 0.01
# Cost of drafting and verifying k tokens in plain steps, and the prior expectation for a drafted token.
MACHINES: dict[str, tuple[Callable[[int], float], float]] = {
    "small-draft": (lambda k: 1.04 + 0.12 * k, 0.1),
    "draft-dearer-than-expected": (lambda k: 1.05 + 0.34 * k, 0.16),
    "lookup": (lambda k: 1.04 + 0.02 * k, 0.0),
    "several-rows-cost-twice": (lambda k: 2 + 0.12 * k, 0.1),
    "rows-are-not-free": (lambda k: 1 + 0.6 * k, 0.1),
}


class Machine:
    """Runs a policy: `speed` is the time of plain steps divided by its time."""

    def __init__(self, name: str, acceptance: float, seed: int) -> None:
        self.cost, weight = MACHINES[name]
        self.notices: list[str] = []
        self.policy = AdaptiveDraftLength(weight, self.notices.append)
        self.acceptance = acceptance
        self.random = random.Random(seed)
        self.lengths: list[int] = []

    def make(self, tokens: int, room: int = LENGTHS[-1], lag: int = 1) -> float:
        made, seconds = 0, 0.0
        while made < tokens:
            count = self.policy.length(room, lag)
            self.lengths.append(count)
            if not count:
                seconds, made = seconds + STEP, made + 1
                self.policy.observe_plain(STEP)
                continue
            accepted = next((i for i in range(count) if self.random.random() >= self.acceptance), count)
            took = STEP * self.cost(count)
            self.policy.observe_draft(count, accepted, lag, took)
            seconds, made = seconds + took, made + accepted + 1
        return made * STEP / seconds


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", MACHINES)
def test_the_whole_is_never_below_97_percent_of_plain(name: str, acceptance: float) -> None:
    for seed in range(10):
        for tokens in (80, 200, 1000):
            assert Machine(name, acceptance, seed).make(tokens) > 0.97, (seed, tokens)


@pytest.mark.parametrize("acceptance", [0.7, 0.8, 0.9])
@pytest.mark.parametrize("name", MACHINES)
def test_what_pays_comes_close_to_the_best_length(name: str, acceptance: float) -> None:
    cost, _ = MACHINES[name]
    best = max(1.0, *(expected_tokens(acceptance, k) / cost(k) for k in LENGTHS))
    speeds = sorted(Machine(name, acceptance, seed).make(3000) for seed in range(5))
    # Where several rows cost twice, short drafts lose and long ones are expensive to try: a small gain may be missed.
    assert speeds[2] > (0.98 if name == "several-rows-cost-twice" and best < 1.5 else 0.85 * best)


def test_it_says_once_that_it_does_not_pay_and_tries_again_ever_more_rarely() -> None:
    machine = Machine("small-draft", 0.0, 0)
    machine.make(5000)
    assert len(machine.notices) == 1 and "speculation is paused" in machine.notices[0]
    tries = [index for index, count in enumerate(machine.lengths) if count]
    assert 1 < len(tries) < 250 and tries[-1] > 4000
    assert len([index for index in tries if index < 1000]) > len([index for index in tries if index > 4000])


def test_only_the_class_of_proposals_that_does_not_pay_is_stopped() -> None:
    notices: list[str] = []
    policy = AdaptiveDraftLength(0.1, notices.append)
    for _ in range(3):
        policy.observe_plain(STEP)
    while not policy.stopped(1):
        assert not policy.stopped(0) and not policy.stopped(2)
        if count := policy.length(8, 1, 0):
            policy.observe_draft(count, count, 1, STEP * (1.04 + 0.12 * count), 0)
        if count := policy.length(8, 1, 1):
            policy.observe_draft(count, 0, 1, STEP * (1.04 + 0.12 * count), 1)
    assert policy.length(8, 1, 0) > 0 and not policy.stopped(0)
    assert not notices, "the other class still drafts"


def test_it_starts_again_when_the_text_changes() -> None:
    machine = Machine("small-draft", 0.0, 0)
    machine.make(1000)
    machine.acceptance = 0.9
    machine.make(1000)
    assert machine.make(500) > 2


def test_old_earnings_do_not_pay_for_long_failures() -> None:
    machine = Machine("small-draft", 0.95, 0)
    machine.make(5000)
    machine.acceptance = 0.0
    assert 300 / machine.make(300) - 300 < 30, "plain steps lost"


def test_nothing_is_drafted_where_nothing_fits_or_before_a_plain_step_is_known() -> None:
    policy = AdaptiveDraftLength(0.1)
    assert policy.length(8, 1) == 0 and policy.step_seconds is None
    for _ in range(3):
        policy.observe_plain(STEP)
    assert policy.step_seconds == STEP
    assert policy.length(0, 1) == 0 and policy.length(1, 1) == 1 and policy.length(8, 1) == 1


def before_the_first_draft(draft_cost: float) -> AdaptiveDraftLength:
    policy = AdaptiveDraftLength(draft_cost)
    policy.observe_plain(STEP, tokens=PLAIN_STEPS)
    return policy


def test_a_first_draft_is_tried_only_where_the_estimates_promise_a_gain() -> None:
    accepted, compared = PRIOR_ACCEPTANCE
    dearest = expected_tokens(accepted / compared, 1) / MIN_GAIN - PASS_COST - TOKEN_COST  # of drafts of one token
    cheaper, dearer = before_the_first_draft(dearest - 0.01), before_the_first_draft(dearest + 0.01)
    assert cheaper.length(8, 1) == 1 and not cheaper.stopped()
    assert dearer.length(8, 1) == 0 and dearer.stopped()


def test_few_unread_tokens_cost_nothing_and_more_a_share_of_a_draft_token_each() -> None:
    dear = before_the_first_draft(0.6)
    assert dear.length(8, FREE_LAG) == 1 and dear.length(8, FREE_LAG + 1) == 0
    cheap = before_the_first_draft(0.1)
    most = (START_BUDGET + 1 - PASS_COST - TOKEN_COST - 0.1) / 0.1 / READ_COST
    assert cheap.length(8, int(most)) == 1 and cheap.length(8, int(1.1 * most)) == 0


def test_a_long_text_is_read_in_advance_only_where_that_was_earned() -> None:
    machine = Machine("small-draft", 0.9, 0)
    for _ in range(3):
        machine.policy.observe_plain(STEP)
    assert machine.policy.length(8, 1) > 0
    assert machine.policy.length(8, 2000) == 0
    machine.make(300)
    machine.policy.observe_plain(STEP)
    assert machine.policy.length(8, 2000) > 0


def test_an_interruption_does_not_end_speculation() -> None:
    machine = Machine("small-draft", 0.9, 0)
    machine.make(200)
    machine.policy.observe_draft(4, 4, 1, 100 * STEP)
    assert machine.make(200) > 2


def test_a_proposer_without_proposals_is_asked_ever_less_if_asking_costs() -> None:
    policy = AdaptiveDraftLength(0.1)
    asked = 0
    for _ in range(1000):
        wanted = policy.length(8, 1) > 0
        asked += wanted
        policy.observe_plain(STEP, wasted=STEP * wanted)
    assert 0 < asked < 25


def test_fixed() -> None:
    assert FixedDraftLength(4).length(9, 1) == 4 and FixedDraftLength(4).length(2, 999) == 2


def test_the_plain_policy_never_drafts_and_has_nothing_to_pause() -> None:
    policy = DraftLengthPolicy()
    policy.observe_plain(STEP, tokens=PLAIN_STEPS)
    assert policy.length(8, 1) == 0 and not policy.stopped()


@pytest.mark.parametrize(
    ("draft_cost", "gpu", "lengths"),
    [(0.0, False, LONG_LENGTHS), (0.0, True, LENGTHS), (0.1, False, LENGTHS), (0.1, True, LENGTHS)],
)
def test_drafts_are_long_only_where_they_cost_nothing_and_need_no_graphs(
    draft_cost: float, gpu: bool, lengths: tuple[int, ...]
) -> None:
    assert draft_lengths(draft_cost, gpu) == lengths


def test_expected_tokens_are_the_geometric_sum() -> None:
    for acceptance, drafted in ((0.7, 4), (0.8, 8), (0.9, 4)):
        closed = (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
        assert expected_tokens(acceptance, drafted) == pytest.approx(closed)
    assert expected_tokens(1.0, 8) == 9


def test_each_token_of_a_plain_call_counts() -> None:
    policy = AdaptiveDraftLength(0.1)
    policy.observe_plain(STEP, tokens=PLAIN_STEPS - 1)
    assert policy.length(8, 1) == 0
    policy.observe_plain(STEP)
    assert policy.length(8, 1) == 1
    while not policy.stopped():
        if count := policy.length(8, 1):
            policy.observe_draft(count, 0, 1, 4 * STEP)
        elif not policy.stopped():
            policy.observe_plain(STEP)
    policy.observe_plain(STEP, tokens=FIRST_COOLDOWN - 1)
    assert policy.stopped()
    policy.observe_plain(STEP)
    assert not policy.stopped()


def test_pauses_double_but_never_last_longer_than_the_longest() -> None:
    policy = AdaptiveDraftLength(10.0)  # too expensive for a single draft
    policy.observe_plain(STEP, tokens=PLAIN_STEPS)
    pauses = []
    for _ in range(7):
        assert policy.length(8, 1) == 0 and policy.stopped()
        pauses.append(0)
        while policy.stopped():
            policy.observe_plain(STEP)
            pauses[-1] += 1
    assert pauses[:2] == [FIRST_COOLDOWN, 2 * FIRST_COOLDOWN]
    assert max(pauses) == pauses[-2] == pauses[-1] == LONGEST_COOLDOWN


def test_a_plain_step_is_measured_after_every_32_passes() -> None:
    machine = Machine("lookup", 1.0, 0)
    machine.make(2000)
    plain = [index for index, count in enumerate(machine.lengths) if not count]
    assert plain[:PLAIN_STEPS] == [0, 1, 2]
    assert (
        plain[PLAIN_STEPS:] == list(range(PLAIN_STEPS + REFRESH, len(machine.lengths), REFRESH + 1)) and len(plain) > 6
    )


def test_costs_are_learned_from_passes_with_little_to_read() -> None:
    learned, other = AdaptiveDraftLength(0.1), AdaptiveDraftLength(0.1)
    for policy, lag in ((learned, 2), (other, 3)):
        for _ in range(PLAIN_STEPS):
            policy.observe_plain(STEP)
        policy.observe_draft(1, 1, lag, STEP)
    assert learned._tried == {1} and other._tried == set()
    assert all(learned._costs[size] < other._costs[size] for size in LENGTHS), "cheaper than estimated"


def test_every_draft_has_a_pass_that_a_gpu_captures_before_the_first_request() -> None:
    rows = {padded_tokens((1 + count, 1), drafts=True) for count in LENGTHS}
    assert {(tokens, padded) for tokens, padded in rows if padded} == {(count, True) for count in DRAFT_BUCKETS}
    assert {(1, 1 + count) for count in LENGTHS} <= set(decode_shapes(1, drafted=True))
