"""Test that the captured plain pass equals the plain pass on the CPU bit for bit, for any family and cache.

A recording replaces the CUDA graph, and the native kernel the GPU's attention.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.cache.window_pool import NONE
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import COMPILERS, Compiler, Passes, compile_passes
from mycli.runtime.engine.passes.base import OnDecline, PassInput
from mycli.runtime.engine.passes.captured import (
    CapturedStep,
    PromptStep,
    decline_capture,
    decline_captured,
    decline_waiting,
)
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.fused_models import decline_config
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK, PromptKind
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import KvDtype
from tests.support.families import CASES, make
from tests.support.graphs import UncomparedPass, recording
from tests.support.grids import chosen
from tests.support.native_parts import WIDE, load_bf16, need_native_code
from tests.support.prefix_model import CONFIG

# Softcaps, post-norms; sinks, biases; partial and interleaved rotary; layers without rotary; per-layer inputs and
# shared keys; queries scaled by position; multipliers; norms over all heads; parallel attention and MLP; a dense Llama.
QUICK = [
    "gemma2-mqa-low-caps-untied",
    "gpt_oss-window7-gqa4:2",
    "glm4-half-turned",
    "smollm3-untied-window",
    "gemma4-ple-shared-kv-double",
    "gemma3n-sparse-shared-kv",
    "ministral3-beyond",
    "granite-multipliers",
    "olmo3-window7",
    "cohere2-window7-tied",
    "llama-gqa4:2-hd16",
    "qwen3_5-delta",
    "qwen3_next-8top3",
    "lfm2-untied-biases",
    "granitemoehybrid-8top3",
    "falcon_h1-multipliers",
    "mamba2-2-groups",
    "jamba-8top3",
    "kimi_linear-8top3",
    "deepseek_v2-yarn",
    "llama4-chunk16-4top1",
]
# Without families whose tables depend on the length, whose heads are too narrow for native code, or whose experts are
# chosen in plain torch.
LEFT_OUT = ("dynamic", "alpha", "longrope-beyond", "phimoe")
FIXED = [case for case in CASES if not any(word in case for word in LEFT_OUT)]
HEADS = {"mamba2-2-groups": {"num_heads": 16}, "mamba2-odd-sizes-biases-tied": {"num_heads": 12}}  # for WIDE
LENGTHS = (61, 5, 64)  # tokens before the compared passes: blocks of 64 are started and crossed
TABLES = ((5, 2), (4,), (1, 3))
SLOTS = (2, 0, 3)  # of recurrent states


def passes_of(runner: ModelRunner, kind: KvDtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits of decode steps, of verified drafts and of prompts, and the cache contents afterwards."""
    windows = 8 if runner.config.longest_window is not None else 0
    cache = KVCache(runner.config, 6, KEY_BLOCK, runner.device, cache_dtype(kind, runner.dtype), 4, windows)
    runner.rope(2 * KEY_BLOCK)

    def chunk(tokens: list[int], start: int, blocks: tuple[int, ...], logits: int, slot: int) -> Chunk:
        own = [NONE if start > (index + 2) * KEY_BLOCK - 30 else 7 - block for index, block in enumerate(blocks)]
        return Chunk(tokens, start, blocks, logits, slot, window_blocks=tuple(own) if windows else None)

    generator, vocab = torch.Generator().manual_seed(1), runner.config.vocab_size
    texts = [torch.randint(3, vocab, (length + 40,), generator=generator).tolist() for length in LENGTHS]
    for slot, (text, length, blocks) in enumerate(zip(texts, LENGTHS, TABLES, strict=True)):
        runner.run([chunk(text[:length], 0, blocks, 0, SLOTS[slot])], cache)
    found, done = [], 0
    for new, sequences in ((1, 3), (1, 3), (3, 3), (1, 2), (3, 1), (1, 3)):
        chunks = []
        for text, length, blocks, slot in list(zip(texts, LENGTHS, TABLES, SLOTS, strict=True))[:sequences]:
            start = length + done
            chunks.append(chunk(text[start : start + new], start, blocks, new, slot))
        found.append(runner.run(chunks, cache).clone())
        done += new
    for counts, every in (((20,), False), ((11,), True), ((1, 2), False), ((2, 1, 3), True)):  # padded to 32, 16, 8, 4
        chunks = []
        for text, length, blocks, slot, count in zip(texts, LENGTHS, TABLES, SLOTS, counts, strict=False):
            start = length + done
            chunks.append(chunk(text[start : start + count], start, blocks, count if every else 1, slot))
        found.append(runner.run(chunks, cache).clone())
        done += 0 if counts == (20,) else max(counts)
    found.append(runner.run([chunk(texts[0][:9], 0, TABLES[0], 1, SLOTS[0])], cache).clone())  # a new sequence
    parts = [part for layer in range(runner.config.layers) for part in cache.all(layer)]
    held = [tensor for part in parts for tensor in (part.data, part.scales) if tensor is not None]
    recurrent = [spec.index for spec in runner.config.layer_specs if spec.recurrent is not None]
    return found, [*held, *(state for layer in recurrent for state in cache.states.layer(layer))]


@pytest.mark.parametrize("case", chosen(FIXED, QUICK))
def test_the_captured_pass_is_the_plain_one(case: str, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, **HEADS.get(case, {})})
    check(load_bf16(tmp_path).model, "auto")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_with_quantized_caches(kind: KvDtype, tmp_path: Path) -> None:
    need_native_code()
    make(tmp_path, "gemma2", {**WIDE, **CASES["gemma2-window7-tied"][1], "head_dim": 64})
    check(load_bf16(tmp_path).model, kind)


@pytest.mark.parametrize("case", ["gemma2-mqa-low-caps-untied", "gpt_oss-window7-gqa4:2", "llama-gqa4:2-hd16"])
def test_longer_prompts_have_a_pass_of_their_own(case: str, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, "max_position_embeddings": 1024})
    model = load_bf16(tmp_path).model
    step = PromptStep(model)
    plain = PlainPass(model)
    way = UncomparedPass(step, plain, recording, pytest.fail, name="prompts")
    text = torch.randint(3, model.config.vocab_size, (700,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for passes in (Passes((way, plain), {}), Passes((plain,), {})):
        runner = ModelRunner(model, "auto", passes)
        cache, tables = (
            KVCache(model.config, 12, KEY_BLOCK, model.device, torch.bfloat16),
            ((7, 2, 9, 4, 0, 11), (3, 8)),
        )
        runner.rope(12 * KEY_BLOCK)
        logits = [runner.run([Chunk(text[:10], 0, tables[0], 1)], cache).clone()]
        for count in (280, 300, 270):  # launched, captured and replayed, each padded to 384
            logits.append(runner.run([Chunk(text[10 : 10 + count], 10, tables[0], 1)], cache).clone())
        both = [Chunk(text[10:160], 10, tables[0], 1), Chunk(text[:100], 0, tables[1], 1)]
        found.append([*logits, runner.run(both, cache).clone()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    shapes = way._compared
    assert shapes == {(1, 384, True), (2, 256, True)}
    assert not step.takes(1, 256) and not step.takes(1, 2048) and not step.takes(8, 256)


def check(model: Transformer, kind: KvDtype) -> None:
    """Check that logits and caches are equal and that the captured step ran every pass after the prompts."""
    step = CapturedStep(model)
    plain = PlainPass(model)
    way = UncomparedPass(step, plain, recording, pytest.fail, name="captured")
    expected, theirs = passes_of(ModelRunner(model, kind), kind)
    found, ours = passes_of(ModelRunner(model, kind, Passes((way, plain), {})), kind)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.nan_to_num(mine.float()), torch.nan_to_num(other.float()))
    shapes = way._compared
    equal = {(4, 1, False), (2, 1, False), (1, 3, False)}
    assert shapes == equal | {(1, 32, True), (1, 16, True), (2, 8, True), (4, 4, True)}, "padded to 1, 2 and 4"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_latents_and_states_with_quantized_caches(kind: KvDtype, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES["kimi_linear-8top3"]
    make(tmp_path, model_type, {**WIDE, **changes, "kv_lora_rank": 64, "qk_rope_head_dim": 64})
    check(load_bf16(tmp_path).model, kind)


class Failing:
    """A captured step that spoils the logits, or raises after it has run, as long as `fault` is set."""

    def __init__(self, step: CapturedStep, fault: Literal["none", "differs", "raises"]) -> None:
        self.step, self.fault = step, fault
        self.takes = step.takes

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        logits = self.step(inputs, rope, cache, last)
        if self.fault == "raises":
            raise RuntimeError("no memory")
        return -logits if self.fault == "differs" else logits


@pytest.mark.parametrize("fault", ["none", "differs", "raises"])
def test_states_advance_once_whatever_happens_to_the_first_pass(
    fault: Literal["none", "differs", "raises"], tmp_path: Path
) -> None:
    """A first pass of nine rows is compared: neither the comparison nor a failure may advance the states."""
    need_native_code()
    model_type, changes = CASES["qwen3_5-delta"]
    make(tmp_path, model_type, {**WIDE, **changes})
    model, reported = load_bf16(tmp_path).model, list[Declined]()
    step = CapturedStep(model)
    plain = PlainPass(model)
    failing = Failing(step, fault)
    way = CudaPass(failing, plain, recording, reported.append, name="captured")
    results = []
    for passes in (Passes((way, plain), {}), Passes((plain,), {})):
        runner = ModelRunner(model, "auto", passes)
        cache = KVCache(model.config, 9, KEY_BLOCK, model.device, torch.bfloat16, slots=9)
        runner.rope(KEY_BLOCK)
        logits = [
            runner.run([Chunk([at + 7 * slot], at, (slot,), 1, slot) for slot in range(9)], cache).clone()
            for at in range(4)
        ]
        failing.fault = "none"  # drafts of one sequence are compared at load
        drafts = runner.run([Chunk([1, 2, 3], 4, (0,), 3, 0, drafted=2)], cache).clone()
        cache.states.commit_drafts(0, 2)
        results.append([*logits, drafts, *cache.states.layer(0)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    code = {"none": [], "differs": ["logits-differ"], "raises": ["kernels-failed"]}[fault]
    assert [declined.code for declined in reported] == code


class Committed:
    """The plain pass, after which each sequence accepts all its drafts: what was queued advances the states."""

    def __init__(self, model: Transformer) -> None:
        self._plain, self.changed = PlainPass(model), list[bool]()
        self.name, self.samples, self.takes, self.tokens = "plain", False, self._plain.takes, self._plain.tokens

    def logits(self, work: PassInput) -> Tensor:
        logits, states = self._plain.logits(work), work.cache.states
        before = states.layer(0)[0].clone()
        for chunk in work.chunks:
            states.commit_drafts(chunk.state, chunk.count)
        self.changed.append(not torch.equal(states.layer(0)[0], before))
        return logits


def test_the_comparison_of_a_first_pass_keeps_no_rows(tmp_path: Path) -> None:
    """A queued update holds the rows of its layer: for a prompt of 1,024 tokens of Qwen3-Next 80B 868 MiB in all."""
    make(tmp_path, "lfm2", {**WIDE, **CASES["lfm2-tied"][1]})
    model = load_bf16(tmp_path).model
    step, plain = CapturedStep(model), Committed(model)
    way = CudaPass(step, plain, recording, pytest.fail)
    cache = KVCache(model.config, 1, KEY_BLOCK, model.device, torch.bfloat16)
    way.logits(PassInput([Chunk(list(range(3, 35)), 0, (0,), 1)], cache, ModelRunner(model).rope(KEY_BLOCK)))
    assert plain.changed == [False]


def test_what_compiles_the_kernels_leaves_the_states_alone(tmp_path: Path) -> None:
    model_type, changes = CASES["lfm2-tied"]
    make(tmp_path, model_type, {**WIDE, **changes})
    model = load_bf16(tmp_path).model
    step = CapturedStep(model)
    way = CudaPass(step, PlainPass(model), recording)
    cache = KVCache(model.config, 1, KEY_BLOCK, model.device, torch.bfloat16)
    way.launch(PassInput([Chunk([5, 6], 0, (0,), 1)], cache, ModelRunner(model).rope(KEY_BLOCK)))
    assert cache.all(1)[0].data.any() and not cache.states.layer(0)[0].any()


def test_experts_that_the_host_must_know_are_not_captured() -> None:
    """Experts that share no launch are multiplied one by one, for which the host waits."""
    pytest.importorskip("triton")
    from tests.support.decode_models import MIXED, models

    packed, _ = models(MIXED[0])
    assert decline_waiting(packed) is None
    next(packed.layers()).mlp.products[2].replace(torch.zeros(192, 128))
    declined = decline_waiting(packed)
    assert declined is not None and declined.code == "experts-read-by-host"


def test_experts_chosen_in_plain_torch_are_not_captured(tmp_path: Path) -> None:
    make(tmp_path, *CASES["phimoe-window7-tied-biases"])
    declined = decline_captured(open_model_folder(tmp_path).config)
    assert declined is not None and declined.code == "routing-kind"


def test_it_is_compiled_where_the_fused_pass_is_not(tmp_path: Path) -> None:
    """The captured pass is compiled only where the fused pass is not, since both serve the same work."""
    make(tmp_path, "llama", {**WIDE})
    model = load_bf16(tmp_path).model
    assert [name for name, compiler in COMPILERS.items() if compiler.fallback] == ["captured"]
    for fused in (True, False):

        def compile_fused(
            model: Transformer, kv: KvDtype, report: OnDecline, fused: bool = fused
        ) -> PlainPass | Declined:
            return PlainPass(model) if fused else Declined("attention-sinks")

        def compile_captured(model: Transformer, kv: KvDtype, report: OnDecline) -> CudaPass:
            step = CapturedStep(model)
            return CudaPass(step, PlainPass(model), None, name="captured")

        compilers = {
            "cuda": Compiler("cpu", lambda: compile_fused),  # noqa: B023  (reason: called before the next round)
            "captured": Compiler("cpu", lambda: compile_captured, fallback=True),
        }
        passes = compile_passes(model, compilers=compilers)
        assert [way.name for way in passes.passes] == (["plain", "plain"] if fused else ["captured", "plain"])
        assert set(passes.declined) == (set() if fused else {"cuda"})
        chunk = Chunk([1], 3, (0,), 1)
        cache = KVCache(model.config, 1, KEY_BLOCK, model.device, torch.bfloat16)
        chosen_pass = passes.choose(PassInput([chunk], cache, ModelRunner(model).rope(KEY_BLOCK)))
        assert chosen_pass is passes.passes[0]


def on_gpu(head_dim: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """Return what a step reads of a dense bf16 model with 8 heads for each key-value head, on an imitated GPU."""
    from mycli.runtime.kernels.triton import paged_attention
    from mycli.runtime.kernels.triton.product import matmul
    from mycli.runtime.kernels.triton.product.tiles import Chip
    from mycli.runtime.kernels.triton.prompt_attention import prompt_tile

    chip = Chip(capability, 100)

    def decline(kind: PromptKind) -> Declined | None:
        return None if prompt_tile(chip, kind.head_dim, kind.stored) else Declined("attention-shape")

    monkeypatch.setattr(matmul, "chip_of", lambda device: chip)
    monkeypatch.setattr(paged_attention, "decline_prompts", decline)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device, head = torch.device("cuda", 10 * capability[0] + capability[1]), SimpleNamespace(matmuls=())
    config = replace(CONFIG, heads=8, head_dim=head_dim)
    parts = {"config": config, "device": device, "dtype": torch.bfloat16, "head": head, "layers": list}
    return cast(Transformer, SimpleNamespace(**parts))


@pytest.mark.parametrize(("head_dim", "capability", "taken"), [(512, (8, 9), 0), (512, (9, 0), 2), (256, (12, 0), 2)])
def test_prompts_are_captured_where_a_kernel_attends_with_their_heads(
    head_dim: int, capability: tuple[int, int], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check heads of 512 (Gemma 4), for which the kernel for prompts has no tile."""
    step = PromptStep(on_gpu(head_dim, capability, monkeypatch), "auto")
    assert sum(step.takes(1, tokens) for tokens in (384, 1024)) == taken


def test_an_old_gpu_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    declined = decline_capture(on_gpu(128, (7, 5), monkeypatch))
    assert declined is not None and declined.code == "compute-capability"


def test_a_model_without_a_cache_has_neither_pass() -> None:
    config = replace(CONFIG, bidirectional=True)
    assert decline_captured(config) == decline_config(config) == Declined("bidirectional")
