"""The size of a KV cache: its blocks, and those of layers with a sliding window, which need fewer."""

from dataclasses import dataclass, replace

from mycli.runtime.models.config import ModelConfig

SHARED_BLOCK = 64  # positions per block of a shared cache: small enough to share prefixes, and block tables stay short
# Blocks are reserved ahead when no other sequence needs them: the longest call of a device makes 8 tokens.
LOOKAHEAD_TOKENS = 8


@dataclass(frozen=True)
class CacheShape:
    context: int  # of the longest sequence, in tokens
    blocks: int
    block_size: int  # positions
    window_blocks: int = 0  # of layers with a sliding window; 0 if they store every position, as others do

    @classmethod
    def contiguous(cls, context: int, sequences: int = 1) -> "CacheShape":
        """Return one block of `context` tokens for each sequence, which kernels read in place."""
        return cls(context, sequences, context)

    @classmethod
    def paged(cls, context: int, tokens: int, block_size: int) -> "CacheShape":
        return cls(context, -(-tokens // block_size), block_size)

    def without_windows(self) -> "CacheShape":
        return replace(self, window_blocks=0)

    def blocks_of(self, windowed: bool) -> int:
        return self.window_blocks or self.blocks if windowed else self.blocks


def cache_shape(config: ModelConfig, context: int, sequences: int, running: int, chunk: int) -> CacheShape:
    """Return the cache for `sequences` of `context` tokens, shared by up to `running` sequences.

    chunk: prompt tokens in a pass. The cache is contiguous for one sequence, unless layers have fewer blocks.
    """
    paged = CacheShape.paged(context, context * sequences, SHARED_BLOCK)
    needed = window_blocks(config, sequences, running, chunk)
    if needed is not None and needed < paged.blocks:
        return CacheShape(context, paged.blocks, SHARED_BLOCK, needed)
    return CacheShape.contiguous(context, sequences) if max(sequences, running) == 1 else paged


def window_blocks(
    config: ModelConfig, sequences: int, running: int, chunk: int, block_size: int = SHARED_BLOCK
) -> int | None:
    """Return the blocks of layers with a window with which no sequence waits for one; None without such layers."""
    window = config.longest_window
    if window is None or config.has_recurrent:  # a recurrent model resumes at snapshots of its states alone
        return None
    # A running sequence holds the blocks of its window and of the tokens ahead, and one that it copies. As many of
    # `sequences` that ended let their prefixes be reused. The tokens of one pass are shared by all.
    held = -(-(window + LOOKAHEAD_TOKENS) // block_size) + 2
    return (running + sequences) * held + -(-chunk // block_size) + 1
