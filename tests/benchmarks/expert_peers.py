"""Compares the decode rate of a random MoE model with llama.cpp's, in memory or with half of the memory it needs.

    python -m tests.benchmarks.expert_peers --llama-bench PATH [--limit BYTES --expert-memory SIZE] [--layers 12]
        [--rounds 3] [--keep FOLDER]

The same shape is written twice: packed as `quantize` packs, int4 in groups of 128, and as GGUF, Q4_0 in blocks of 32.
With --limit each program runs in a control group (version 1, which needs root) with that memory limit, page cache
included: llama.cpp maps its file, mycli holds as many experts of each layer as --expert-memory allows. Every run is a
process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.packed_folder import write_packed
from tests.support.random_packed import mixture_fields

GROUP = Path("/sys/fs/cgroup/memory")


def write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """Write the same shape as random Q4_0 blocks, with norms of one and the routers and the embedding in floats."""
    hidden, size, experts = fields["hidden_size"], fields["moe_intermediate_size"], fields["num_experts"]
    writer, random = gguf.GGUFWriter(path, "qwen3moe"), np.random.default_rng(0)
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_expert_feed_forward_length(size)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(fields["num_experts_per_tok"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(fields["head_dim"])
    writer.add_value_length(fields["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(2)
    tokens = fields["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{index}" for index in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def blocks(name: str, *dimensions: int) -> None:
        *outer, inner = dimensions
        data = random.integers(0, 256, (*outer, inner // 32, 18), dtype=np.uint8)
        data[..., 0:2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        writer.add_tensor(name, data.reshape(*outer, inner // 32 * 18), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def floats(name: str, *dimensions: int) -> None:
        made = np.ones(dimensions) if len(dimensions) == 1 else random.standard_normal(dimensions) / hidden**0.5
        writer.add_tensor(name, made.astype(np.float32))

    floats("output_norm.weight", hidden)
    writer.add_tensor("token_embd.weight", (random.standard_normal((tokens, hidden)) / 8).astype(np.float16))
    heads, keys = (fields[name] * fields["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    for layer in range(fields["num_hidden_layers"]):
        block = f"blk.{layer}"
        for norm, width in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", 64), ("attn_k_norm", 64)):
            floats(f"{block}.{norm}.weight", width)
        for name, rows, columns in (
            ("attn_q", heads, hidden),
            ("attn_k", keys, hidden),
            ("attn_v", keys, hidden),
            ("attn_output", hidden, heads),
        ):
            blocks(f"{block}.{name}.weight", rows, columns)
        floats(f"{block}.ffn_gate_inp.weight", experts, hidden)
        blocks(f"{block}.ffn_gate_exps.weight", experts, size, hidden)
        blocks(f"{block}.ffn_up_exps.weight", experts, size, hidden)
        blocks(f"{block}.ffn_down_exps.weight", experts, hidden, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def limited(nbytes: int | None) -> Iterator[list[str]]:
    """Yield the command prefix that limits a process to `nbytes` of memory; empty for None."""
    if nbytes is None:
        yield []
        return
    group = GROUP / f"expert_peers.{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def forget(*paths: Path) -> None:
    """Drop files from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _json(command: Sequence[str]) -> Any:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed ({ran.returncode}): {ran.stderr[-2000:]}")
    return json.loads(ran.stdout)


def theirs(program: str, model: Path, tokens: int, prefix: Sequence[str]) -> float:
    """Return llama.cpp's decode rate in tokens per second; with a memory limit, weights are mapped, not repacked."""
    mapped = ["--repack", "0", "--load-mode", "mmap"] if prefix else []
    sizes = ["-p", "0", "-n", str(tokens), "-t", str(len(os.sched_getaffinity(0))), "-r", "1", "-o", "json"]
    return float(_json([*prefix, program, "-m", str(model), *sizes, *mapped])[0]["avg_ts"])


def ours(model: Path, tokens: int, prefix: Sequence[str], held: str | None) -> tuple[float, float | None]:
    """Return mycli's decode rate in tokens per second, and the share of expert reads that were served from memory."""
    sizes = ["-p", "0", "-n", str(tokens), "-r", "1", "--device", "cpu", "-o", "json", "-q"]
    bound = [] if held is None else ["--expert-memory", held]
    found = _json([*prefix, sys.executable, "-m", "mycli.cli", "bench", str(model), *sizes, *bound])["results"][-1]
    return float(found["tokens_per_second"]), found["expert_hit_rate"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", default=os.environ.get("LLAMA_BENCH"))
    parser.add_argument("--limit", type=int, help="bytes of memory, page cache included, of each program")
    parser.add_argument("--expert-memory", help="as `mycli bench` takes it, within --limit")
    parser.add_argument("--keep", type=Path, help="where the two models are, or come to be")
    for name, default in (
        ("layers", 12),
        ("hidden", 1536),
        ("experts", 64),
        ("size", 768),
        ("rounds", 3),
        ("tokens", 48),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if not given.llama_bench:
        print("skipped: no llama-bench (give --llama-bench or set LLAMA_BENCH)")
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = given.keep or Path(temporary)
        place.mkdir(exist_ok=True)
        fields = mixture_fields(given.layers, given.hidden, given.experts, given.size)
        packed, blocks = place / "packed", place / "q4_0.gguf"
        if not packed.exists():
            write_packed(packed, fields, {"": 4}, group=128)
            write_gguf(blocks, fields)
        files = (packed / "model.safetensors", blocks)
        print(f"packed {files[0].stat().st_size / 1e6:.0f} MB, GGUF {files[1].stat().st_size / 1e6:.0f} MB", flush=True)
        pairs = []
        for _ in range(given.rounds):
            forget(*(files if given.limit else ()))
            with limited(given.limit) as prefix:
                them = theirs(given.llama_bench, blocks, given.tokens, prefix)
            forget(*(files if given.limit else ()))
            print(f"llama.cpp {them:.1f} tokens/s", flush=True)
            with limited(given.limit) as prefix:
                us, hits = ours(packed, given.tokens, prefix, given.expert_memory)
            pairs.append((us, them))
            there = "" if hits is None else f", {hits:.0%} of experts in memory"
            print(f"mycli {us:.1f} tokens/s{there}", flush=True)
        us, them = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(own / peer for own, peer in pairs)
        print(f"medians: mycli {us:.1f}, llama.cpp {them:.1f} tokens/s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
