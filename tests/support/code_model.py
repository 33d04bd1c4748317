"""Trains a Llama of 30 M parameters on the Python code that is installed here, as a second model to quantize.

python -m tests.support.code_model OUT [--steps N]

Next to the folder OUT it writes `OUT.calibration.txt`, code that the model has read, and `OUT.held-out.txt`, files that
it has not. The default number of steps takes 25 minutes on two cores with bf16 dot products; `OUT.steps` holds the
latest tenth step, from which the same command continues if it was stopped.
"""

import argparse
import hashlib
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, SEQ = 270, 8, 512
VOCABULARY, END = 4096, "<|endoftext|>"
# Packages whose files differ from each other; the files of `transformers` mostly repeat each other.
PACKAGES = ("torch", "sympy", "networkx", "numpy", "mypy", "hypothesis")
_LENGTHS = range(1_000, 40_000)  # characters of a file
_TEXT = 600_000  # characters of each text that is written
_MATRIX_RATE, _RATE = 0.02, 3e-3


def files() -> Iterator[Path]:
    """Yield the Python files of the standard library and of `PACKAGES`, without tests."""
    library, packages = Path(sysconfig.get_paths()["stdlib"]), Path(sysconfig.get_paths()["purelib"])
    for root in (library, *(packages / name for name in PACKAGES)):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if not {"test", "tests", "site-packages"} & set(parts) and path.stat().st_size in _LENGTHS:
                yield path


def documents() -> tuple[list[str], list[str]]:
    """Return the files to train on and the held-out ones, one in twenty, each in a random but fixed order."""
    drawn: list[tuple[str, str]] = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        drawn.append((hashlib.sha256(text.encode()).hexdigest(), text))
    ordered = sorted(dict(drawn).items())  # a file that occurs twice is taken once
    shown = [text for digest, text in ordered if int(digest[-8:], 16) % 20]
    return shown, [text for digest, text in ordered if int(digest[-8:], 16) % 20 == 0]


def build_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def _pack(texts: list[str], tokenizer: Tokenizer) -> Tensor:
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(texts):
        ids += [*encoded.ids, 0]
    return torch.tensor(ids, dtype=torch.int64)


def _loss(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(windows[:, :-1]).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(model: LlamaForCausalLM, tokens: Tensor, held_out: Tensor, steps: int, saved: Path) -> None:
    """Train on random windows of `tokens`; print the loss, and that of the first windows of `held_out`.

    `saved` is the file of the latest tenth step, from which training continues.
    """
    matrices = [value for name, value in model.named_parameters() if value.ndim == 2 and "embed" not in name]
    others = [value for name, value in model.named_parameters() if value.ndim != 2 or "embed" in name]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.Muon(matrices, lr=_MATRIX_RATE, momentum=0.95, weight_decay=0.01), _MATRIX_RATE),
        (torch.optim.AdamW(others, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0), _RATE),
    ]
    generator, started = torch.Generator().manual_seed(0), time.monotonic()
    unseen = held_out[: 16 * (SEQ + 1)].view(16, SEQ + 1)
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        first = state["step"]
        model.load_state_dict(state["model"])
        generator.set_state(state["generator"])
        for (optimizer, _), values in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    for step in range(first, steps):
        share = min(1.0, (step + 1) / 40, max(0.02, 1.5 * (1 - step / steps)))
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        starts = torch.randint(len(tokens) - SEQ - 1, (BATCH,), generator=generator).tolist()
        loss = _loss(model, torch.stack([tokens[start : start + SEQ + 1] for start in starts]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            states = [optimizer.state_dict() for optimizer, _ in optimizers]
            state = {"step": step + 1, "model": model.state_dict(), "generator": generator.get_state()}
            written = saved.with_name(f"{saved.name}.part")
            torch.save({**state, "optimizers": states}, written)
            written.replace(saved)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            with torch.no_grad():
                found = sum(float(_loss(model, part)) for part in unseen.split(4)) / 4
            rate = (step + 1 - first) * BATCH * SEQ / (time.monotonic() - started)
            print(f"step {step + 1}: loss {loss.item():.3f}, held-out {found:.3f}, {rate:.0f} tokens/s", flush=True)


def write(out: Path, steps: int = STEPS) -> None:
    """Write the trained model in the Hugging Face layout to `out`, and its two texts next to it."""
    shown, hidden = documents()
    tokenizer = build_tokenizer(shown[::8])
    tokens, unseen = _pack(shown, tokenizer), _pack(hidden, tokenizer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    count = sum(value.numel() for value in model.parameters())
    print(f"{len(shown)} files, {len(tokens):,} tokens, {count:,} parameters", flush=True)
    saved = out.with_name(f"{out.name}.steps")
    train(model, tokens, unseen, steps, saved)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 2048}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    for name, texts in (("calibration", shown), ("held-out", hidden)):
        out.with_name(f"{out.name}.{name}.txt").write_text("\n".join(texts)[:_TEXT], encoding="utf-8")
    saved.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    write(options.out, options.steps)


if __name__ == "__main__":
    main()
