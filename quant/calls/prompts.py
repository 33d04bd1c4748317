"""The built-in tool prompts, and replies to them in a model's own format.

None of these tools and questions occur in the calibration text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mycli.runtime.tokenizer.chat_template import Message, Tool


def _tool(name: str, description: str, **parameters: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_NUMBER = {"type": "number"}
_COUNT = {"type": "integer"}

TOOLS = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "Get the weather of a city.", city=_text("name of the city")),
        _tool("add_numbers", "Add two numbers.", a=_NUMBER, b=_NUMBER),
        _tool("set_timer", "Start a timer.", minutes=_COUNT),
        _tool("send_message", "Send a message to a person.", to=_text("name"), text=_text("what to say")),
        _tool("find_book", "Find books by an author.", author=_text("name of the author"), limit=_COUNT),
        _tool("play_music", "Play music.", artist=_text("name"), shuffle={"type": "boolean"}),
        _tool("convert_units", "Convert a length.", value=_NUMBER, unit={"type": "string", "enum": ["km", "miles"]}),
        _tool("buy_items", "Put items into the basket.", items={"type": "array", "items": {"type": "string"}}),
    )
}


@dataclass(frozen=True)
class CallPrompt:
    """A question that one of `tools` answers, with the call to expect."""

    question: str
    tools: tuple[Tool, ...]
    name: str
    arguments: Mapping[str, Any]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message("user", self.question),)

    @property
    def reasoning(self) -> str:
        return f"The user needs {self.name}."

    def reply(self, reasoning: bool) -> Message:
        call = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}
        return Message("assistant", "", tool_calls=(call,), reasoning=self.reasoning if reasoning else "")

    @property
    def values(self) -> list[tuple[str, str]]:
        """Each argument's name, with its value as it may stand in a reply, without quotes."""
        return [(name, json.dumps(value, ensure_ascii=False).strip('"')) for name, value in self.arguments.items()]


_CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}),
    ("What is the weather in Tokyo?", "get_weather", {"city": "Tokyo"}),
    ("How is the weather in London today?", "get_weather", {"city": "London"}),
    ("Add 3 and 4.", "add_numbers", {"a": 3, "b": 4}),
    ("Add 12 and 30.", "add_numbers", {"a": 12, "b": 30}),
    ("What is 7 plus 25?", "add_numbers", {"a": 7, "b": 25}),
    ("Set a timer for 5 minutes.", "set_timer", {"minutes": 5}),
    ("Set a timer for 45 minutes.", "set_timer", {"minutes": 45}),
    ("Wake me in 20 minutes.", "set_timer", {"minutes": 20}),
    ("Tell Anna that dinner is ready.", "send_message", {"to": "Anna", "text": "dinner is ready"}),
    ("Tell Peter that the train is late.", "send_message", {"to": "Peter", "text": "the train is late"}),
    ("Send Mary the message good night.", "send_message", {"to": "Mary", "text": "good night"}),
    ("Find 3 books by Jane Austen.", "find_book", {"author": "Jane Austen", "limit": 3}),
    ("Find 10 books by Tolstoy.", "find_book", {"author": "Tolstoy", "limit": 10}),
    ("Which 2 books by Shakespeare do you have?", "find_book", {"author": "Shakespeare", "limit": 2}),
    ("Play music by Mozart, shuffled.", "play_music", {"artist": "Mozart", "shuffle": True}),
    ("Play music by Bach, in order.", "play_music", {"artist": "Bach", "shuffle": False}),
    ("Play something by Verdi, shuffled.", "play_music", {"artist": "Verdi", "shuffle": True}),
    ("Convert 5 km to miles.", "convert_units", {"value": 5, "unit": "km"}),
    ("Convert 26 miles to km.", "convert_units", {"value": 26, "unit": "miles"}),
    ("How many miles are 100 km?", "convert_units", {"value": 100, "unit": "km"}),
    ("Buy bread and milk.", "buy_items", {"items": ["bread", "milk"]}),
    ("Buy eggs, butter and tea.", "buy_items", {"items": ["eggs", "butter", "tea"]}),
    ("Put apples and rice into the basket.", "buy_items", {"items": ["apples", "rice"]}),
)


def call_prompts() -> list[CallPrompt]:
    """Return the prompts; each offers its tool and the two that follow it in `TOOLS`."""
    names = list(TOOLS)
    prompts = []
    for index, (question, name, arguments) in enumerate(_CALLS):
        start = names.index(name) - index % 3  # the right tool is the first, second or third
        offered = tuple(TOOLS[names[(start + step) % len(names)]] for step in range(3))
        prompts.append(CallPrompt(question, offered, name, arguments))
    return prompts
