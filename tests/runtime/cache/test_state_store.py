"""Test updates of recurrent states after passes over drafts that were interrupted."""

from collections.abc import Mapping
from pathlib import Path

import torch

from mycli.runtime.cache.state_store import StateStore
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.families import CASES, make


def test_a_restored_state_is_not_advanced_by_an_interrupted_pass(tmp_path: Path) -> None:
    """One of two sequences was committed; then its slot went to another one, with a state from the disk."""
    model_type, changes = CASES["lfm2-tied"]
    make(tmp_path, model_type, changes)
    store = StateStore(open_model_folder(tmp_path).config, 3, torch.device("cpu"))
    places = [tensor for layer in store._layers.values() for tensor in layer]

    def update(accepted: Mapping[int, int]) -> None:
        for slot, count in accepted.items():
            for tensor in places:
                tensor[slot] += count

    stored = store.read_bytes(2)
    store.defer((0, 1), update)
    store.commit_drafts(0, 2)
    store.write_bytes(0, bytearray(stored))
    store.discard_drafts()
    assert store.read_bytes(0) == stored

    store.defer((0, 1), update)
    store.commit_drafts(0, 2)
    store.commit_drafts(1, 0)
    assert all(bool((tensor[0] == 2).all()) and not tensor[1].any() for tensor in places), "each by its own number"
