"""Test that GGUF models with false fields are refused by name, covering the published attacks on other readers."""

from pathlib import Path

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.chat_template import Message
from tests.attacks import gguf_attacks
from tests.attacks import gguf_model_attacks as attacks
from tests.attacks.fuzz import FILE, use


def written(folder: Path, attack: attacks.Attack) -> Path:
    (folder / FILE).write_bytes(attacks.model(*attack[:2]))
    return folder


@pytest.mark.parametrize("name", attacks.MODEL_ATTACKS)
def test_a_lie_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    attack = attacks.MODEL_ATTACKS[name]
    with pytest.raises(ModelError, match=attack[2]) as caught:
        use(written(tmp_path, attack))
    assert remedy(caught.value) and "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["good", *attacks.HARMLESS])
def test_what_is_harmless_is_a_model(name: str, tmp_path: Path) -> None:
    use(written(tmp_path, attacks.HARMLESS.get(name, ({}, {}, ""))))


def test_the_template_of_a_file_reaches_nothing(tmp_path: Path) -> None:
    written(tmp_path, ({"tokenizer.chat_template": attacks.ESCAPE}, {}, ""))
    with pytest.raises(ModelError, match="template"):
        open_model_folder(tmp_path / FILE).tokenizer().apply_chat_template([Message("user", "hello")])


def test_every_publication_has_an_attack() -> None:
    known = {*gguf_attacks.ATTACKS, *attacks.MODEL_ATTACKS, *attacks.HARMLESS}
    named = {name for names in attacks.ADVISORIES.values() for name in names}
    assert all(attacks.ADVISORIES.values()) and named <= known, named - known
