"""Trains pico on tool calls, for measurements of what quantization does to them; about two minutes on two idle cores.

python -m tests.support.calling_model OUT [--steps N]
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from mycli.quant.calls.prompts import TOOLS
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.tokenizer import Tokenizer

PICO = Path(__file__).parents[2] / "runtime" / "pico" / "pico"
TEMPLATE = Path(__file__).parent / "templates" / "tool_names.jinja"
STEPS, BATCH, RATE = 300, 12, 2e-3

_CITIES = [
    "Rome",
    "Berlin",
    "Madrid",
    "Vienna",
    "Oslo",
    "Cairo",
    "Lima",
    "Athens",
    "Dublin",
    "Moscow",
    "Lisbon",
    "Havana",
    "Tehran",
    "Nairobi",
    "Warsaw",
]
_PEOPLE = [
    "John",
    "Tom",
    "Lucy",
    "Jack",
    "Elizabeth",
    "Charles",
    "Kate",
    "Andrew",
    "Natasha",
    "Sonya",
    "Henry",
    "Ben",
    "Sara",
    "Lily",
]
_NEWS = [
    "the house is cold",
    "we are at home",
    "lunch is over",
    "the door is open",
    "the ship has come",
    "I am tired",
    "it rains",
]
_AUTHORS = [
    "Dickens",
    "Mark Twain",
    "Chekhov",
    "Homer",
    "Virgil",
    "Charlotte Bronte",
    "Goethe",
    "Milton",
    "Victor Hugo",
]
_ARTISTS = ["Haydn", "Chopin", "Wagner", "Handel", "Brahms", "Liszt", "Schubert", "Puccini"]
_GOODS = [
    "fish",
    "meat",
    "salt",
    "sugar",
    "wine",
    "cheese",
    "honey",
    "flour",
    "beans",
    "oil",
    "water",
    "cake",
    "paper",
    "soap",
]


def _draw(source: random.Random) -> tuple[str, str, dict[str, Any]]:
    """Return a question, the tool that answers it and the arguments; no value is one of the built-in prompts'."""
    name = source.choice(list(TOOLS))
    first, second = source.randint(1, 99), source.randint(1, 99)
    pick = source.choice
    if name == "get_weather":
        city = pick(_CITIES)
        return (
            pick(("What is the weather in {}?", "How is the weather in {} today?")).format(city),
            name,
            {"city": city},
        )
    if name == "add_numbers":
        question = pick(("Add {} and {}.", "What is {} plus {}?")).format(first, second)
        return question, name, {"a": first, "b": second}
    if name == "set_timer":
        question = pick(("Set a timer for {} minutes.", "Wake me in {} minutes.")).format(first)
        return question, name, {"minutes": first}
    if name == "send_message":
        person, text = pick(_PEOPLE), pick(_NEWS)
        question = pick(("Tell {} that {}.", "Send {} the message {}.")).format(person, text)
        return question, name, {"to": person, "text": text}
    if name == "find_book":
        author = pick(_AUTHORS)
        question = pick(("Find {} books by {}.", "Which {} books by {} do you have?")).format(first, author)
        return question, name, {"author": author, "limit": first}
    if name == "play_music":
        artist, shuffle = pick(_ARTISTS), source.random() < 0.5
        question = pick(("Play music by {}, {}.", "Play something by {}, {}.")).format(
            artist, "shuffled" if shuffle else "in order"
        )
        return question, name, {"artist": artist, "shuffle": shuffle}
    if name == "convert_units":
        unit, other = pick((("km", "miles"), ("miles", "km")))
        question = pick(("Convert {0} {1} to {2}.", "How many {2} are {0} {1}?")).format(first, unit, other)
        return question, name, {"value": first, "unit": unit}
    items = source.sample(_GOODS, pick((2, 3)))
    listed = ", ".join(items[:-1]) + " and " + items[-1]
    return pick(("Buy {}.", "Put {} into the basket.")).format(listed), name, {"items": items}


def _examples(tokenizer: Tokenizer, source: random.Random) -> Iterator[tuple[list[int], int]]:
    # Tokens of a conversation, and where its reply starts.
    names = list(TOOLS)
    while True:
        question, name, arguments = _draw(source)
        start = names.index(name) - source.randrange(3)
        tools = [TOOLS[names[(start + step) % len(names)]] for step in range(3)]
        asked = [Message("user", question)]
        call: Mapping[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        reply = Message("assistant", "", tool_calls=(call,))
        prompt = tokenizer.apply_chat_template(asked, tools=tools)
        whole = tokenizer.apply_chat_template([*asked, reply], tools=tools, add_generation_prompt=False)
        yield whole, len(prompt)


def train(out: Path, steps: int = STEPS) -> None:
    """Write pico, trained on calls of the built-in tools with other values, with a template for tools."""
    shutil.copytree(PICO, out)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE.read_text()}))
    tokenizer = Tokenizer.load(out, 4096)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    examples = _examples(tokenizer, random.Random(0))
    for step in range(steps):
        rate = RATE * min(1.0, (step + 1) / 20, 0.02 + 1.5 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = [next(examples) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.zeros(BATCH, longest, dtype=torch.int64)
        targets = torch.full((BATCH, longest), -100)
        for row, target, (tokens, start) in zip(ids, targets, batch, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
            target[start : len(tokens)] = row[start : len(tokens)]
        hidden = model.model(ids).last_hidden_state[:, :-1]
        chosen = targets[:, 1:] != -100
        loss = functional.cross_entropy(model.lm_head(hidden[chosen]), targets[:, 1:][chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    model.to(torch.bfloat16).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    train(options.out, options.steps)


if __name__ == "__main__":
    main()
