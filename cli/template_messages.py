"""The messages for what a check of a chat template finds, one for each code of `Finding`."""

from collections.abc import Mapping

from mycli.runtime.tokenizer.template_check.finding import Finding

_CACHED = "turns, so the prefix cache is lost from there on"
# code -> (message, what to do); the fields in braces are the values of `Finding.data`
TEMPLATE_MESSAGES: Mapping[str, tuple[str, str]] = {
    "syntax": ("line {line}: {cause}", "correct the template"),
    "private-attribute": ("line {line}: reads {value!r}, which the sandbox refuses", "remove it"),
    "other-file": ("line {line}: {value} of another file, and a template has none", "copy its text here"),
    "random": ("line {line}: the filter random makes every prompt another one", "remove it"),
    "time-of-day": (
        "line {line}: the time ({value!r}) is part of every prompt, so no request reuses the cache of another",
        "remove it, or write the date alone",
    ),
    "date": ("line {line}: the date ({value!r}) is part of every prompt: caches of other days are not reused", ""),
    "slow": ("{messages} messages take {milliseconds} ms, {growth:.1f} times the time of a quarter", ""),
    "own-variable": ("reads variables of its own: {names}", "set them with --template-arg NAME=VALUE"),
    "fails": ("{what}: {cause}", "correct the template"),
    "refuses": ("{what}: {cause}", ""),
    "content-altered": ("a text is not rendered as it was sent: {text!r} becomes {rendered!r}", "remove the filter"),
    "content-trimmed": (
        "white space around the text of {roles} is removed; a reply that ends with it is not reused from the cache",
        "",
    ),
    "history-changes": (
        "{scenario}: the next prompt changes earlier " + _CACHED,
        "render every message independently of those that follow",
    ),
    "reply-opening-changes": (
        "{scenario}: a reply is opened with other text than the next prompt has in its place, so each reply is "
        "computed again",
        "open earlier replies as the generation prompt does",
    ),
    "reply-altered": (
        "{scenario}: the next prompt has other text than the model wrote, so each reply is computed again",
        "write the reply as it is",
    ),
    "no-generation-prompt": (
        "add_generation_prompt changes nothing, though replies begin with {opening!r}: the model has to write it",
        "add the opening where add_generation_prompt is true",
    ),
    "turns-must-alternate": ("two questions in a row: {cause}", "clients must join them"),
    "system-refused": ("a system prompt: {cause}", "clients must put it into the first question"),
    "system-dropped": ("the system prompt is not rendered", "render messages of the role system"),
    "system-not-first": ("the system prompt follows the first question", ""),
    "later-system-refused": ("a system message between turns: {cause}", ""),
    "later-system-dropped": ("a system message between turns is not rendered", "render it, or refuse it"),
    "no-tools": ("renders no tools", "the server describes them in the system prompt"),
    "tools-not-rendered": ("reads tools, but does not render their names", "render each tool as JSON"),
    "parameters-not-rendered": ("does not render the parameters of tools: {names}", "render each tool as JSON"),
    "call-not-rendered": ("earlier tool calls are not rendered", "render tool_calls of the assistant"),
    "call-not-parsed": (
        "a rendered call is not read back as {format}: {written!r}",
        "declare the format: response_template in tokenizer_config.json",
    ),
    "unknown-call-format": (
        "the format of tool calls is unknown: {written!r}",
        "declare it: response_template in tokenizer_config.json",
    ),
    "calls-refused": ("a conversation with a tool call: {cause}", ""),
    "several-calls-refused": ("two calls in one message: {cause}", "the server renders them one after another"),
    "call-ids-refused": ("a call id of the server: {cause}", "remove the check"),
    "result-not-rendered": ("the result of a tool is not rendered", "render messages of the role tool"),
    "reasoning-dropped": ("the reasoning of earlier replies is not rendered", ""),
    "reasoning-dropped-later": (
        "the reasoning of a reply is removed with the next question: from there on the cache is lost once",
        "",
    ),
    "reasoning-dropped-in-loop": (
        "reasoning is removed between a tool call and its result: the model reasons again",
        "keep it until the next question",
    ),
    "bos-missing": ("does not begin with {token}, which the tokenizer adds to other texts", "begin with bos_token"),
    "bos-twice": ("begins with {token} twice", "write it once"),
    "turn-not-ended": (
        "a reply is followed by {after!r} without a stop token ({tokens}): replies do not end there",
        "add the token to eos_token_id in generation_config.json",
    ),
    "call-not-ended": (
        "a tool call is followed by {after!r} without a stop token ({tokens}): calls do not end there",
        "add the token to eos_token_id in generation_config.json",
    ),
    "marker-not-a-token": ("{marker} is not a token of this model, but several", "use the template of this model"),
    "turns-can-be-forged": (
        "no control token separates a question from its reply ({opening!r}): a text can imitate turns",
        "",
    ),
    "spelled-token-refused": ("a question that spells {token} is refused", "copy texts without a condition on them"),
}


def template_message(finding: Finding) -> str:
    return TEMPLATE_MESSAGES[finding.code][0].format_map(finding.data)


def template_remedy(finding: Finding) -> str:
    return TEMPLATE_MESSAGES[finding.code][1]
