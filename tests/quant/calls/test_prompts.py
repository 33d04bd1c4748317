"""Test the built-in tool prompts."""

import json

from mycli.quant.calibration import sampler
from mycli.quant.calls.measure import is_valid
from mycli.quant.calls.prompts import TOOLS, call_prompts


def test_each_prompt_offers_its_tool_and_expects_a_valid_call() -> None:
    prompts = call_prompts()
    assert len(prompts) == 24 == len({prompt.question for prompt in prompts})
    assert {prompt.name for prompt in prompts} == set(TOOLS)
    places = [[tool["function"]["name"] for tool in prompt.tools].index(prompt.name) for prompt in prompts]
    assert [places.count(place) for place in range(3)] == [8, 8, 8]
    for prompt in prompts:
        assert is_valid(((prompt.name, json.dumps(prompt.arguments)),), prompt.tools)


def test_the_expected_arguments_are_those_of_the_question() -> None:
    for prompt in call_prompts():
        values = [
            part for value in prompt.arguments.values() for part in (value if isinstance(value, list) else [value])
        ]
        assert all(str(value) in prompt.question for value in values if not isinstance(value, bool)), prompt.question
    shuffled = {prompt.question for prompt in call_prompts() if prompt.arguments.get("shuffle")}
    assert shuffled == {prompt.question for prompt in call_prompts() if "shuffled" in prompt.question}


def test_nothing_of_them_is_calibrated_on() -> None:
    texts = [sampler._bundled(name) for name in ("tool_conversations.json", "conversations.json")]
    for prompt in call_prompts():
        assert not any(prompt.question in text or f'"{prompt.name}"' in text for text in texts)
