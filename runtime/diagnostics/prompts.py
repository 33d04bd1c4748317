"""Built-in prompts by kind of text: how well a draft predicts differs much between them."""

from collections.abc import Mapping
from importlib.resources import files

from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of Japan?",
    "Who are you?",
    "Count from one to twenty.",
    "What is the opposite of hot?",
    "Name the days of the week.",
    "How do I boil an egg?",
)
STORIES = ("Tell me a story.", "Tell me a story about a boat.", "Tell me a story about a dog and a key.")
# Start and length in characters of passages in pico/held-out.txt, which no model of this package was trained on.
PASSAGES = ((1000, 700), (9000, 700), (20_000, 700))
REPEATED = "The cat sat on the mat. The dog lay on the log. "
LIST = "red apple, green pear, blue plum, red apple, green pear, blue plum, red apple, green"


def prompts(tokenizer: Tokenizer) -> Mapping[str, list[list[int]]]:
    """Return token ids of prompts by kind: chat, stories, book, repetitive."""
    book = (files("mycli.runtime") / "pico" / "held-out.txt").read_text(encoding="utf-8")

    def question(text: str) -> list[int]:
        if tokenizer.template is None:
            return tokenizer.encode(text, add_special=True)
        return tokenizer.apply_chat_template([Message("user", text)])

    return {
        "chat": [question(text) for text in QUESTIONS],
        "stories": [question(text) for text in STORIES],
        "book": [tokenizer.encode(book[start : start + size], add_special=True) for start, size in PASSAGES],
        "repetitive": [tokenizer.encode(text, add_special=True) for text in (REPEATED * 6, LIST)],
    }
