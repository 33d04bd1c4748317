"""Train a tiny Llama on the text of corpus.py and save it in the Hugging Face layout.

    python train.py OUT --books FOLDER [--size target|draft] [--steps N] [--tokenizer tokenizer.json]

Needs torch, transformers, tokenizers and numpy. Half of every batch is real text, half synthetic; every 20th document
of the books is held out, and written next to OUT. The same seed and thread count give the same model on one machine.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import corpus
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCABULARY = 4096
CONTEXT = 2048
SIZES = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
MATRIX_RATE, VECTOR_RATE = 0.02, 3e-3
WARMUP_STEPS, DECAY_FROM, FINAL_RATE = 50, 0.4, 0.02


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--size", choices=list(SIZES), default="target")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--books", type=Path, default=Path("."), help="folder of *.txt")
    parser.add_argument("--tokenizer", type=Path, help="reuse this tokenizer.json: a draft needs its target's")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    return parser.parse_args()


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE of `VOCABULARY` tokens with separate digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return all documents as one row of ids, each followed by the end-of-text token."""
    end = tokenizer.token_to_id("<|endoftext|>")
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [*encoding.ids, end]
    return torch.tensor(np.array(ids, dtype=np.int32))


def optimizers(model: LlamaForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the matrices of the blocks and AdamW for the rest, each with its peak learning rate."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        (torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01), MATRIX_RATE),
        (torch.optim.AdamW(rest, lr=VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0.0), VECTOR_RATE),
    ]


def rate_at(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, plateau, linear decay."""
    done = step / steps
    decay = 1.0 if done < DECAY_FROM else max(FINAL_RATE, (1 - done) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


def loss_of(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Return the mean cross entropy of rows [batch, seq + 1], in fp32; bf16 autocast on a GPU."""
    with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=rows.device.type == "cuda"):
        logits = model.lm_head(model.model(rows[:, :-1]).last_hidden_state)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Tensor, seq: int, device: str) -> float:
    """Return the mean loss over at most the first 24 windows of `tokens`."""
    model.eval()
    windows = min(24, (len(tokens) - 1) // seq)
    rows = torch.stack([tokens[i * seq : (i + 1) * seq + 1] for i in range(windows)]).long().to(device)
    loss = float(np.mean([float(loss_of(model, part)) for part in rows.split(8)]))
    model.train()
    return loss


def train(
    model: LlamaForCausalLM, sample: Callable[[], Tensor], report: Callable[[int, float], None], steps: int
) -> None:
    """Train for `steps` steps on batches from `sample`; call `report(step, smoothed loss)` every hundredth step."""
    pairs = optimizers(model)
    smoothed: float | None = None
    for step in range(steps):
        rate = rate_at(step, steps)
        for optimizer, peak in pairs:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        loss = loss_of(model, sample())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in pairs:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smoothed = loss.item() if smoothed is None else 0.95 * smoothed + 0.05 * loss.item()
        if (step + 1) % 100 == 0:
            report(step + 1, smoothed)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder: weights in bf16, tokenizer, chat template, sampling defaults."""
    end, turn_end = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {
        "bos_token_id": end,
        "eos_token_id": [end, turn_end],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (out / "generation_config.json").write_text(json.dumps(generation_config, indent=1))


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    documents = list(corpus.books(options.books))
    held_out = documents[::20]
    real = [document for index, document in enumerate(documents) if index % 20]
    synthetic = list(corpus.documents(40000, 1))
    if options.tokenizer:
        tokenizer = Tokenizer.from_file(str(options.tokenizer))
    else:
        tokenizer = build_tokenizer(real + synthetic[:4000])
    sources = encode(tokenizer, synthetic), encode(tokenizer, real)
    held_out_books = encode(tokenizer, held_out)
    held_out_synthetic = encode(tokenizer, list(corpus.documents(400, 2)))
    print(f"synthetic {len(sources[0])} tokens, real {len(sources[1])}", flush=True)

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        **SIZES[options.size],
    )
    model = LlamaForCausalLM(config).to(device)
    print("parameters", sum(p.numel() for p in model.parameters()), flush=True)
    generator = torch.Generator().manual_seed(0)

    def sample() -> Tensor:
        rows = []
        for index in range(options.batch):
            source = sources[index % 2]
            start = int(torch.randint(len(source) - options.seq - 1, (1,), generator=generator))
            rows.append(source[start : start + options.seq + 1])
        return torch.stack(rows).long().to(device)

    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        seconds = time.monotonic() - started
        books = held_out_loss(model, held_out_books, options.seq, device)
        synthetic_loss = held_out_loss(model, held_out_synthetic, options.seq, device)
        print(
            f"step {step} {seconds:.0f} s train {loss:.3f} held-out books {books:.3f} synthetic {synthetic_loss:.3f}"
            f" {step * options.batch * options.seq / seconds:.0f} tokens/s",
            flush=True,
        )

    train(model, sample, report, options.steps)
    save(model, tokenizer, options.out)
    (options.out.parent / f"{options.out.name}.held-out.txt").write_text("\n\n".join(held_out)[:400_000])


if __name__ == "__main__":
    main()
