"""Measures which share of the memory bandwidth decoding reaches for each family, and compares with Llama.

    python -m tests.benchmarks.family_share [FAMILY ...] [--megabytes 270] [--rounds 12] [--steps]

For each family a random model is built in memory, int4 in groups of 128 (gpt_oss: experts in MXFP4), with as many
layers of similar width as read about `--megabytes` for a token: more than the last-level cache holds, since otherwise
only llama would fit in it. A round decodes some tokens with Llama and some with the family. Prints the medians of both
shares of the memory bandwidth, of their ratio, and of the milliseconds per token; with `--steps` also those without
native layer calls.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.kernels.cpu.matmul import memory_bandwidth
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.random_packed import packings, random_model
from tests.support.waiting_threads import wait_as_the_command_does

PROMPT, TOKENS = 8, 8  # tokens per round
SHAPE = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3072,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DELTA = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
MIXTURE = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
ROUTED = {
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
MAMBA = {"mamba_n_heads": 32, "mamba_d_state": 128, "mamba_n_groups": 1}
PLAIN_MAMBA = {"n_groups": 8, "conv_kernel": 4}
NARROW = {"sliding_window": 512}
# Differences from `SHAPE` by model_type; a suffix after `-` names the variant.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": NARROW,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": NARROW,
    "gemma2": {**NARROW, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64},
    "gemma3_text": {**NARROW, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64},
    "gemma4_text": {
        **NARROW,
        "global_head_dim": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 8192,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text-A4B": {
        **NARROW,
        "global_head_dim": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 32,
        "top_k_experts": 4,
        "moe_intermediate_size": 512,
        "intermediate_size": 2048,
    },
    "gpt_oss": {
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 1024,
        "sliding_window": 128,
    },
    "smollm3": {},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "seed_oss": {},
    "exaone4": {**NARROW, "sliding_window_pattern": 4},
    "cohere2": NARROW,
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "arcee": {"hidden_act": "relu2"},
    "cwm": NARROW,
    "qwen3_moe": {**MIXTURE, "norm_topk_prob": True},
    "qwen2_moe": {**MIXTURE, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    "olmoe": {**MIXTURE, "intermediate_size": 512},
    "granitemoe": {
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 6.0,
    },
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **MIXTURE},
    "qwen3_next": {**DELTA, **MIXTURE},
    "lfm2": {"block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
    "lfm2_moe": {**MIXTURE, "num_dense_layers": 2, "conv_L_cache": 3},
    "glm4_moe": ROUTED,
    "dots1": {**ROUTED, "norm_topk_prob": True},
    "solar_open": ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 32, "moe_k": 4, "moe_intermediate_size": 512, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "intermediate_size": 1024},
    "minimax_m2": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512, "rotary_dim": 32},
    "cohere": {},
    "glm": {},
    "helium": {},
    "deepseek_v2": {**LATENT, **ROUTED, "n_shared_experts": 2},
    "deepseek_v3": {**LATENT, **ROUTED, "q_lora_rank": 512, "n_group": 4, "topk_group": 2},
    "glm4_moe_lite": {**LATENT, **ROUTED, "q_lora_rank": 512},
    "youtu": {**LATENT, "q_lora_rank": 512},
    "granitemoehybrid": {
        **MAMBA,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "shared_intermediate_size": 512,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [2, 5, 8]},
    "nemotron_h": {
        **PLAIN_MAMBA,
        **ROUTED,
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "moe_shared_expert_intermediate_size": 1024,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64},
    "mamba2": {**PLAIN_MAMBA, "num_heads": 32, "head_dim": 64, "state_size": 128},
}


def shape(family: str, layers: int) -> ModelConfig:
    """Return a config of `family` with this number of layers."""
    fields = {**SHAPE, **FAMILIES[family], "model_type": family.partition("-")[0], "num_hidden_layers": layers}
    if family.startswith("lfm2"):
        fields["layer_types"] = ["full_attention" if index % 3 == 2 else "conv" for index in range(layers)]
    if family == "granitemoehybrid":
        fields["layer_types"] = ["attention" if index % 8 == 5 else "mamba" for index in range(layers)]
    if family == "nemotron_h":
        fields["hybrid_override_pattern"] = ("MEME*EME" * layers)[:layers]
    return parse_config(Fields(fields, "a random shape"))


def read_of(config: ModelConfig) -> int:
    """Return the number of bytes read for one token."""
    return bytes_per_step(MemoryPlan(config, packings(config), context=512), PROMPT)


def sized(family: str, nbytes: int) -> ModelConfig:
    """Return the smallest config of `family` that reads `nbytes` per token, in steps of four layers."""
    layers = 8
    while read_of(shape(family, layers)) < nbytes:
        layers += 4
    return shape(family, layers)


class Decoder:
    """Holds a random model and the bytes that it reads for a token."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.nbytes = config, read_of(config)
        model = random_model(config)
        self._runner = ModelRunner(model, passes=compile_passes(model))
        self._plain = ModelRunner(model)
        self._cache = self._runner.make_cache(CacheShape.contiguous(512))

    def seconds(self, turn: int, plain: bool = False) -> float:
        """Return the median seconds of a token; `plain`: with the plain pass."""
        runner = self._plain if plain else self._runner
        runner.run([Chunk(list(range(PROMPT)), 0, (0,), 1)], self._cache)
        times = []
        for place in range(PROMPT, PROMPT + TOKENS):
            began = time.perf_counter()
            runner.run([Chunk([(place * 7919 + turn) % 8192], place, (0,), 1)], self._cache)
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def compare(family: str, llama: Decoder, nbytes: int, rounds: int, steps: bool) -> None:
    """Measure a family against Llama and print a line."""
    own = Decoder(sized(family, nbytes))
    ours, theirs, ratios, stepwise = [], [], [], []
    own.seconds(0)
    for turn in range(rounds):
        rate = memory_bandwidth(1 << 29, 1)
        assert rate is not None
        seconds = own.seconds(turn)
        ours.append(seconds)
        theirs.append(llama.nbytes / llama.seconds(turn) / rate)
        ratios.append(own.nbytes / seconds / rate / theirs[-1])
        if steps:
            stepwise.append(own.seconds(turn, plain=True))
    ratio, share, token = (statistics.median(each) for each in (ratios, theirs, ours))
    by_steps = f", {1e3 * statistics.median(stepwise):.2f} by steps" if steps else ""
    layers, megabytes = own.config.layers, own.nbytes / 1e6
    print(
        f"{family:17} {ratio:4.2f} of Llama's share, {ratio * share:.2f} of {share:.2f}: "
        f"{layers} layers, {megabytes:.0f} MB, {1e3 * token:.2f} ms{by_steps}",
        flush=True,
    )


def main() -> None:
    """Print a line for each family."""
    wait_as_the_command_does()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--megabytes", type=float, default=270)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    families: Sequence[str] = given.families or list(FAMILIES)
    if unknown := set(families) - set(FAMILIES):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if memory_bandwidth(1 << 20, 1) is None:
        raise SystemExit("there is no native code here")
    nbytes = int(given.megabytes * 1e6)
    llama = Decoder(sized("llama", nbytes))
    for family in families:
        compare(family, llama, nbytes, given.rounds, given.steps)


if __name__ == "__main__":
    main()
