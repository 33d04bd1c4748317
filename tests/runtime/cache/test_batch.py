"""Test the tensors of a pass over several sequences."""

import torch

from mycli.runtime.cache.batch import Batch, Chunk

CHUNKS = (Chunk((7, 8, 9), 2, (4, 1), 1), Chunk((5,), 0, (3,), 1), Chunk((6, 6), 4, (0, 2), 2))


def test_tokens_have_their_places_in_cache_and_pass() -> None:
    batch = Batch.of(CHUNKS, 4, torch.device("cpu"))
    assert batch.rows == 6 and batch.tokens.tolist() == [7, 8, 9, 5, 6, 6]
    assert batch.positions().tolist() == [2, 3, 4, 0, 4, 5]
    assert batch.slot_mapping.tolist() == [18, 19, 4, 12, 8, 9]
    assert batch.starts.tolist() == [0, 3, 4, 6] and batch.lengths.tolist() == [5, 1, 6]
    assert batch.logits_at.tolist() == [2, 3, 4, 5]


def test_tensors_are_on_the_device_of_the_pass() -> None:
    batch = Batch.of(CHUNKS, 4, torch.device("meta"))
    tensors = (batch.tokens, batch.slot_mapping, batch.positions(), batch.starts, batch.block_table, batch.logits_at)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
