"""Test prompts for code between a prefix and a suffix, in the format of each family."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.errors import UsageError
from mycli.runtime.tokenizer.fill_in_middle import find_fim_tokens
from mycli.runtime.tokenizer.gguf_tokenizer import tokenizer_settings
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.json_fields import Fields
from tests.support.small_tokenizers import ATTACKS, added, make

PLAIN = json.loads((ATTACKS / "plain.json").read_text())

BOS: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [257], "tokens": ["<bos>"]}},
}
# The model cards' prompts for `a()` before the gap and `b()` after it, with the file x.py of text `x`.
FAMILIES = {
    "qwen-coder": (
        "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|>",
        "<|repo_name|>myproject\n<|file_sep|>x.py\nx<|file_sep|>filename\n",
        "<|fim_prefix|>a()<|fim_suffix|>b()<|fim_middle|>",
    ),
    "codegemma": (
        "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|file_separator|>",
        "<|file_separator|>x.py\nx<|file_separator|>filename\n",
        "<|fim_prefix|>a()<|fim_suffix|>b()<|fim_middle|>",
    ),
    "starcoder2": (
        "<fim_prefix> <fim_suffix> <fim_middle> <fim_pad> <repo_name> <file_sep>",
        "<repo_name>myproject\n<file_sep>x.py\nx<file_sep>filename\n",
        "<fim_prefix>a()<fim_suffix>b()<fim_middle>",
    ),
    "granite": (
        "<fim_prefix> <fim_suffix> <fim_middle> <fim_pad> <reponame> <filename>",
        "<reponame>myproject\n<filename>x.py\nx<filename>filename\n",
        "<fim_prefix>a()<fim_suffix>b()<fim_middle>",
    ),
    "deepseek-coder": (
        "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",
        "\n\n--- snippet ---\n\nx",
        "<｜fim▁begin｜>a()<｜fim▁hole｜>b()<｜fim▁end｜>",
    ),
    "codellama": ("▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>", "\n\n--- snippet ---\n\nx", "▁<PRE>a()▁<SUF>b()▁<MID>"),
    "codestral": ("[PREFIX] [SUFFIX] [MIDDLE]", "\n\n--- snippet ---\n\nx", "[SUFFIX]b()[PREFIX]a()"),
    "seed-coder": (
        "<[fim-prefix]> <[fim-suffix]> <[fim-middle]>",
        "\n\n--- snippet ---\n\nx",
        "<[fim-suffix]>b()<[fim-prefix]>a()<[fim-middle]>",
    ),
    "glm": (
        "<|code_prefix|> <|code_suffix|> <|code_middle|>",
        "\n\n--- snippet ---\n\nx",
        "<|code_prefix|>a()<|code_suffix|>b()<|code_middle|>",
    ),
}


def tokenizer_of(folder: Path, names: str, bos: bool = False) -> Tokenizer:
    tokens = ["<end>", "<bos>", *names.split()]
    entries = [added(256 + index, token, special=True) for index, token in enumerate(tokens)]
    return make(folder, added_tokens=entries, **({"post_processor": BOS} if bos else {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_marks_and_the_order_of_its_family(tmp_path: Path, family: str) -> None:
    names, context, gap = FAMILIES[family]
    tokenizer = tokenizer_of(tmp_path, names)
    prompt = tokenizer.fim_prompt("a()", "b()")
    assert tokenizer.spelled(prompt.ids) == gap and not prompt.cut
    assert prompt.ids == tokenizer.encode(gap, add_special=False, allow_special=True)
    prompt = tokenizer.fim_prompt("a()", "b()", [("x.py", "x")])
    assert tokenizer.spelled(prompt.ids) == context + gap and not prompt.cut
    assert tokenizer.fim_tokens is not None
    # Everything but Mistral's middle, which its prompts do not have, ends a reply.
    ends = {tokenizer.vocabulary[index] for index in tokenizer.fim_tokens.ends}
    assert ends == set(names.split()) - {"[MIDDLE]"}


def test_the_start_token_is_first_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "[PREFIX] [SUFFIX]", bos=True)
    prompt = tokenizer.fim_prompt("a", "b", [("x", "y")])
    assert tokenizer.spelled(prompt.ids) == "<bos>\n\n--- snippet ---\n\ny[SUFFIX]b[PREFIX]a"
    short = tokenizer.fim_prompt("a" * 9, "b" * 9, room=12)
    assert tokenizer.spelled(short.ids) == "<bos>[SUFFIX]bb[PREFIX]aaaaaa" and short.cut


def test_marks_spelled_in_the_code_stay_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, FAMILIES["qwen-coder"][0])
    text = 'MARK = "<|fim_suffix|>"'
    prompt = tokenizer.fim_prompt(text, text, [("<|file_sep|>", text)])
    marks = tokenizer.control_ids.intersection(prompt.ids)
    assert tokenizer.fim_tokens is not None and prompt.ids.count(tokenizer.fim_tokens.suffix) == 1
    assert prompt.ids.count(tokenizer.fim_tokens.file or -1) == 2 and len(marks) == 5
    assert tokenizer.spelled(prompt.ids).count(text) == 3


def test_too_much_text_keeps_what_is_nearest_to_the_gap(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, FAMILIES["deepseek-coder"][0])
    before, after, extra = "a" * 50 + "B" * 50, "C" * 50 + "d" * 50, [("x", "e" * 100 + "F" * 10)]

    def spelled(room: int, prefix: str = before, suffix: str = after) -> str:
        prompt = tokenizer.fim_prompt(prefix, suffix, extra, room)
        assert len(prompt.ids) <= room and prompt.cut
        return tokenizer.spelled(prompt.ids)

    gap = "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>".format
    assert spelled(43) == gap("B" * 30, "C" * 10)  # 3 to 1
    assert spelled(43, "BB") == gap("BB", "C" * 38)  # what one leaves is the other's
    assert spelled(43, suffix="CC") == gap("B" * 38, "CC")
    assert spelled(213) == "F" * 10 + gap(before, after)
    assert spelled(3) == gap("", "")


@pytest.mark.parametrize(
    ("files", "context"),
    [
        ((), ["▁", "▁", "b"]),  # of " snippet "
        (("<|repo_name|>", "<|file_sep|>"), ["<|repo_name|>", "<|file_sep|>", "a", "b", "<|file_sep|>", "a"]),
    ],
)
def test_sentencepieces_space_precedes_the_prefix_only(
    tmp_path: Path, files: tuple[str, ...], context: list[str]
) -> None:
    """As in Meta's and Mistral's code: the suffix goes on in the middle of a line."""
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    model = {**PLAIN["model"], "vocab": {"▁": 0, "a": 1, "b": 2}, "merges": []}
    names = ("▁<PRE>", "▁<SUF>", "▁<MID>", *files)
    entries = [added(3 + index, name, special=True) for index, name in enumerate(names)]
    parts = {"model": model, "pre_tokenizer": metaspace, "decoder": metaspace, "added_tokens": entries}
    tokenizer = make(tmp_path, **parts)
    spelled = [tokenizer.vocabulary[index] for index in tokenizer.fim_prompt("a b", "b", [("a", "b")]).ids]
    assert spelled == [*context, "▁<PRE>", "▁", "a", "▁", "b", "▁<SUF>", "b", "▁<MID>"]


def test_a_tokenizer_without_marks_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "<|fim_prefix|> <|fim_suffix|>")
    assert tokenizer.fim_tokens is None
    with pytest.raises(UsageError, match="no fill-in-the-middle tokens"):
        tokenizer.fim_prompt("a", "b")


def test_an_empty_token_is_no_mark() -> None:
    """Names that a model does not set are empty."""
    assert find_fim_tokens(["", "a", None], {}) is None


@pytest.mark.parametrize(
    ("marks", "names"),
    [(["<a>", "<b>"], {"prefix_token": "<a>", "suffix_token": "<b>"}), (["<[fim-prefix]>", "<[fim-suffix]>"], {})],
    ids=["named", "seed-coder"],
)
def test_only_codestral_has_no_mark_of_the_middle(marks: list[str], names: dict[str, str]) -> None:
    assert find_fim_tokens(marks, names) is None and find_fim_tokens(["[PREFIX]", "[SUFFIX]"], {}) is not None


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_a_gguf_file_names_marks_by_their_ids(tmp_path: Path, keys: tuple[str, ...]) -> None:
    tokens = ["a", "<one>", "<two>", "<three>", "<four>"]
    values: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": index + 1 for index, key in enumerate(keys)}
    values |= {"tokenizer.ggml.fim_sep_token_id": 4, "tokenizer.ggml.fim_rep_token_id": 32007}  # of no token
    values |= {"tokenizer.ggml.tokens": tokens}
    values["tokenizer.ggml.token_type"] = array("i", [1, 3, 3, 3, 3])
    settings = tokenizer_settings(Fields(values, "x.gguf"))
    tokenizer_of(tmp_path, "<one> <two> <three> <four>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path, 300)
    prompt = tokenizer.fim_prompt("a", "b", [("x", "y")])
    assert tokenizer.spelled(prompt.ids) == "<four>x\ny<four>filename\n<one>a<two>b<three>"
