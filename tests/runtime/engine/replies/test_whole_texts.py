"""Test the queue of texts for a bidirectional model."""

from pathlib import Path

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.replies.whole_texts import WholeTexts
from mycli.runtime.engine.sequence import Request
from tests.support.embedding_models import encoder
from tests.support.models import CPU


def test_a_text_is_cancelled_while_it_waits_and_others_are_not(tmp_path: Path) -> None:
    runner = load_model(open_model_folder(encoder(tmp_path / "model", "bert")), CPU)
    texts = WholeTexts(runner, chunk=16, context=64)
    first, second, third = (texts.submit(Request((token, 8), hidden_states="last")) for token in (5, 6, 7))
    cancelled = texts.cancel(second)
    assert cancelled is not None and (cancelled.sequence, cancelled.finish_reason) == (second, "cancelled")
    assert texts.cancel(second) is None and texts.waiting == 2
    assert [(output.sequence, output.finish_reason) for output in texts.step()] == [
        (first, "length"),
        (third, "length"),
    ]
    assert texts.cancel(third) is None
