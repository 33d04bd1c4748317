"""Test MTP heads: the proposals equal the reference's, and accepted tokens equal the model's."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.diagnostics import speculation_check
from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.sequence import Request
from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.estimate import cache_bytes
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import embedding_bytes, weight_bytes
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.mtp import MtpHead, MtpProposer
from mycli.runtime.speculative.proposers import Proposal
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.support.engines import contiguous_engine, together
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.prediction import Reference, make_that_predicts, make_with_head
from tests.support.published import published

CPU = torch.device("cpu")
CONTEXT, COUNT = 64, 3


class Recorded(MtpProposer):
    def propose(self, asked: Sequence[DraftRequest]) -> list[Proposal]:
        said = super().propose(asked)
        pairs = zip(asked, said, strict=True)
        self.said = [*getattr(self, "said", []), *((list(one.tokens), each.tokens) for one, each in pairs)]
        return said


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5-odd-heads-tied",
        pytest.param("qwen3_next-8top3", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe-8top3", marks=pytest.mark.slow),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, Reference]:
    path = tmp_path_factory.mktemp("model")
    reference = make_with_head(path, request.param)
    return open_model_folder(path), reference


def proposer(folder: ModelFolder, shape: CacheShape) -> Recorded:
    runner = load_model(folder, Placement(CPU, torch.float32))
    assert folder.mtp_head is not None
    return Recorded(MtpHead(folder.mtp_head, runner), shape)


def engine(drafts: MtpProposer, shape: CacheShape, chunk: int, running: int = 1) -> Engine:
    runner = drafts.head.target
    speculator = ProposerSpeculator(drafts, lambda: FixedDraftLength(COUNT))
    return Engine(runner, shape, runner.config.vocab_size, running=running, chunk=chunk, speculator=speculator)


@pytest.mark.parametrize("chunk", [5, 64])
def test_proposals_are_the_reference_s(folder: tuple[ModelFolder, Reference], chunk: int) -> None:
    shape = CacheShape.contiguous(CONTEXT)
    drafts = proposer(folder[0], shape)
    drafts._chunk = chunk  # so that short prompts are chunked too
    prompt = tuple(random.Random(1).randrange(4, SMALL["vocab_size"]) for _ in range(17))
    reply = together(engine(drafts, shape, chunk), [Request(prompt, limit=16)])[0]
    assert reply == together(contiguous_engine(drafts.head.target, CONTEXT), [Request(prompt, limit=16)])[0]
    assert len(drafts.said) >= 4
    for text, tokens in drafts.said:
        assert text == [*prompt, *reply][: len(text)]
        wanted = folder[1].draft(text, COUNT)
        assert len(tokens) == min(COUNT, len(prompt) + 16 - len(text) - 1)
        for found, (token, lead) in zip(tokens, wanted, strict=False):
            assert found == token or lead < 1e-3, "a tie within rounding"
            if found != token:
                break


def test_replies_are_the_model_s_whoever_runs_beside(folder: tuple[ModelFolder, Reference]) -> None:
    """The replies are greedy and seeded, in few blocks to force recomputation, with shared prefixes and branches."""
    chance = random.Random(2)
    begin = [chance.randrange(4, SMALL["vocab_size"]) for _ in range(18)]
    prompts = [(*begin[: chance.choice([0, 18])], *begin[: 2 + 3 * index]) for index in range(5)]
    asked = [Request(prompt, SamplingParams(0.8 * (i % 2), seed=i), limit=12) for i, prompt in enumerate(prompts)]
    shape = CacheShape(CONTEXT, 16, 6)
    drafts = proposer(folder[0], shape)
    alone = [together(contiguous_engine(drafts.head.target, CONTEXT), [one])[0] for one in asked]
    many = engine(drafts, shape, 11, running=4)
    assert together(many, asked) == alone
    assert together(many, asked) == alone
    assert many.stats.preemptions > 0 and many.stats.prefix_hits > 0
    assert drafts._pool.used == 0 and not drafts._sequences


@pytest.mark.parametrize(
    ("noise", "least", "most"), [(0.0, 1.0, 1.0), (3.0, 0.2, 0.95)], ids=["knows-it-all", "misses-some"]
)
def test_what_a_head_that_predicts_says_stands(noise: float, least: float, most: float, tmp_path: Path) -> None:
    """The replies stay the model's, greedy and seeded; a head that is always right needs one pass per four tokens."""
    make_that_predicts(tmp_path, "qwen3_5-delta", noise)
    drafts = proposer(open_model_folder(tmp_path), CacheShape.contiguous(CONTEXT))
    asked = [Request((5, 6, 7 + i), SamplingParams(0.7 * (i % 2), seed=i), limit=40) for i in range(4)]
    many = engine(drafts, CacheShape.contiguous(CONTEXT, 4), 64, running=4)
    replies = together(many, asked)
    assert replies == [together(contiguous_engine(drafts.head.target, CONTEXT), [one])[0] for one in asked]
    assert all(len(set(reply)) > 5 for reply in replies[::2])  # not the same token forever
    greedy = SpeculationSubject(drafts.head.target, lambda: drafts, 97, frozenset(), CONTEXT)
    for request in asked[::2]:
        _, timing = greedy.reply(engine(drafts, CacheShape.contiguous(CONTEXT), 64), request.prompt, 40)
        assert timing.record is not None
        assert least <= timing.record.acceptance_rate <= most


def test_what_verifying_asks_of_the_head_is_the_reference_s(folder: tuple[ModelFolder, Reference]) -> None:
    """The calls come after a prompt and after its own first tokens, in any order."""
    drafts = proposer(folder[0], CacheShape.contiguous(CONTEXT))
    prompt = [random.Random(3).randrange(4, SMALL["vocab_size"]) for _ in range(13)]
    wanted = [token for token, _ in folder[1].draft(prompt, COUNT)]
    row = speculation_check._mtp_rows(drafts.head.target, drafts.head, prompt)
    for count in (2, 0, 1):
        best = row(*wanted[:count]).topk(2)
        assert int(best.indices[0]) == wanted[count] or best.values[0] - best.values[1] < 1e-3
    with pytest.raises(UsageError, match="one token"):
        speculation_check._mtp_rows(drafts.head.target, drafts.head, prompt[:1])


def test_without_the_hidden_states_before_the_last_token_nothing_is_proposed(
    folder: tuple[ModelFolder, Reference],
) -> None:
    drafts, tokens = proposer(folder[0], CacheShape.contiguous(CONTEXT)), [5, 6, 7, 8, 9]
    states = torch.randn(4, SMALL["hidden_size"], generator=torch.Generator().manual_seed(0))

    sampler = Sampler(SamplingParams(0.0), SMALL["vocab_size"], CPU)

    def proposed(tokens: list[int]) -> int:
        return len(drafts.propose([DraftRequest(0, tokens, COUNT, sampler)])[0].tokens)

    assert proposed(tokens) == 0
    drafts.hidden_state_hook([ComputedTokens(0, 0, 4, tokens)])(states)
    assert proposed([*tokens, 10]) == 0, "those of 9 are missing"
    assert proposed(tokens) == COUNT
    assert proposed(tokens) == 0, "they have been used"


def test_hidden_states_are_read_in_chunks_and_those_left_are_the_lag(folder: tuple[ModelFolder, Reference]) -> None:
    drafts, tokens = proposer(folder[0], CacheShape.contiguous(CONTEXT)), list(range(4, 34))
    drafts._chunk = 5
    states = torch.randn(29, SMALL["hidden_size"], generator=torch.Generator().manual_seed(0))
    assert drafts.lag(0, tokens) == 0
    begin = 0
    for end, lag in ((5, 5), (12, 2), (29, 4)):
        drafts.hidden_state_hook([ComputedTokens(0, begin, end - begin, tokens)])(states[begin:end])
        assert drafts.lag(0, tokens) == lag
        begin = end
    drafts.truncate(0, 27)
    assert drafts.lag(0, tokens) == 2


def test_a_token_of_the_head_costs_what_it_reads(folder: tuple[ModelFolder, Reference]) -> None:
    drafts = proposer(folder[0], CacheShape.contiguous(CONTEXT))
    read = drafts.head.nbytes + drafts.head.target.model.head.nbytes
    assert drafts.relative_cost == read / drafts.head.target.nbytes


def test_draws_from_the_head_leave_the_model_s_distribution(
    folder: tuple[ModelFolder, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test also detects that a rule that accepts every draft changes the distribution."""
    drafts = proposer(folder[0], CacheShape.contiguous(CONTEXT))
    prompt = [random.Random(4).randrange(4, SMALL["vocab_size"]) for _ in range(9)]
    subject = SpeculationSubject(
        drafts.head.target, lambda: drafts, drafts.head.config.vocab_size, frozenset(), CONTEXT
    )
    settings = SamplingParams(temperature=1.0, top_k=4, seed=0)
    assert speculation_check.chi_squared(subject, drafts, prompt, settings, 800).p_value > 1e-4
    monkeypatch.setattr(speculation_check, "rejection_sample", lambda logits, proposal, sampler: proposal.tokens)
    assert speculation_check.chi_squared(subject, drafts, prompt, settings, 800).p_value < 1e-4


def test_what_it_holds_is_estimated(folder: tuple[ModelFolder, Reference]) -> None:
    drafts = proposer(folder[0], CacheShape.contiguous(CONTEXT))
    assert folder[0].mtp_head is not None
    plan = MemoryPlan(folder[0].mtp_head.config, context=CONTEXT, dtype="float32")
    assert drafts.nbytes == weight_bytes(plan) + embedding_bytes(plan) + cache_bytes(plan)


def test_a_model_without_a_head_has_none(tmp_path: Path) -> None:
    make(tmp_path, *CASES["qwen3_5-delta"])
    assert open_model_folder(tmp_path).mtp_head is None
    assert "mtp.fc.weight" not in load_file(tmp_path / "model.safetensors")


def test_the_head_of_a_published_model() -> None:
    """Check names and shapes of the 15 tensors of Qwen3.5-27B's head, and the parameters that 9B's head adds."""
    head, small = published("Qwen3.5-27B").mtp, published("Qwen3.5-9B").mtp
    assert head is not None and small is not None and small.parameters() == 9197093888 - 8953803264
    layer = "model.layers.0"
    assert dict(head.tensors()) == {
        "fc.weight": (5120, 10240),
        "pre_fc_norm_embedding.weight": (5120,),
        "pre_fc_norm_hidden.weight": (5120,),
        f"{layer}.input_layernorm.weight": (5120,),
        f"{layer}.post_attention_layernorm.weight": (5120,),
        f"{layer}.self_attn.q_norm.weight": (256,),
        f"{layer}.self_attn.k_norm.weight": (256,),
        f"{layer}.self_attn.q_proj.weight": (12288, 5120),
        f"{layer}.self_attn.k_proj.weight": (1024, 5120),
        f"{layer}.self_attn.v_proj.weight": (1024, 5120),
        f"{layer}.self_attn.o_proj.weight": (5120, 6144),
        f"{layer}.mlp.gate_proj.weight": (17408, 5120),
        f"{layer}.mlp.up_proj.weight": (17408, 5120),
        f"{layer}.mlp.down_proj.weight": (5120, 17408),
        "model.norm.weight": (5120,),
    }
