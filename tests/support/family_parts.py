"""Settings shared by configurations of several families: a small size, and kinds of rotary embeddings."""

from typing import Any

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 1}  # the families' own ids exceed SMALL's vocabulary

GEMMA4 = {**IDS, "head_dim": 16, "global_head_dim": 32, "sliding_window": 7}

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


def scaled(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


def longrope(pairs: int, original: int, **extra: Any) -> dict[str, Any]:
    """Return a longrope configuration; `original` relative to `families.TOKENS` selects the set of factors."""
    short, long = ([1 + step * index / pairs for index in range(pairs)] for step in (0.5, 30))
    return {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": original,
        **scaled("longrope", short_factor=short, long_factor=long, **extra),
    }


def ministral_rope(original: int, scale: float = 0.4) -> dict[str, Any]:
    more = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": scale}
    return scaled("yarn", factor=4.0, original_max_position_embeddings=original, **more)
