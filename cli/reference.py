"""Writes docs/commands.md from the code: `python -m mycli.cli.reference FILE`, which is `make docs`."""

import sys
from pathlib import Path

from mycli.cli.main import COMMANDS, program
from mycli.runtime.errors import ExitCode

_MEANINGS = {
    ExitCode.OK: "success",
    ExitCode.BUG: "a bug in mycli",
    ExitCode.USAGE: "the command line, an option or the prompt asks for something impossible",
    ExitCode.MODEL: "a bad or unsupported model or file",
    ExitCode.NOT_FOUND: "not found, gated, or the network is down",
    ExitCode.RESOURCES: "not enough memory, disk or device",
    ExitCode.GATE: "the work was done, but a quality or verification gate failed",
    ExitCode.INTERRUPT: "Ctrl-C",
    ExitCode.PIPE: "the reader of the output went away",
    ExitCode.TERMINATED: "SIGTERM or SIGHUP",
}

_INTRODUCTION = """# Commands

Generated from the code by `make docs`.

Results go to standard output, everything else to standard error. `--json` prints one object with `schema_version`
(JSON lines for a stream); an error is then an object with `error`. Away from a terminal there is no colour, no progress
bar and no question; `NO_COLOR` and `TERM=dumb` are honoured.

An option is taken from the command line, else from the environment variable `MYCLI_COMMAND_OPTION` (such as
`MYCLI_CHAT_TEMPERATURE`; `MYCLI_DEVICE` and `MYCLI_OFFLINE` count for every command), else from `mycli/config.toml` in
`$XDG_CONFIG_HOME`, else from the model's `generation_config.json`, else from the program. In config.toml a key at the
top counts for every command that has the option, a key in a table such as `[chat]` for that command.

Downloads live in the Hugging Face cache (`HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` are
honoured), models quantized here in `$MYCLI_HOME` (`$XDG_DATA_HOME/mycli`), history in `$XDG_STATE_HOME/mycli`.
"""


def page() -> str:
    """The whole of docs/commands.md."""
    group = program(frozenset(COMMANDS))
    parts = [_INTRODUCTION, "## Exit codes\n", "| code | meaning |\n|---:|---|"]
    parts[-1] += "".join(f"\n| {int(code)} | {meaning} |" for code, meaning in _MEANINGS.items()) + "\n"
    for name in COMMANDS:
        command = group.commands[name]
        context = command.make_context(f"mycli {name}", [], resilient_parsing=True, max_content_width=100)
        context.terminal_width = 100  # the same page whatever the terminal
        parts.append(f"## mycli {name}\n\n```\n{command.get_help(context).strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
