"""Writes docs/commands.md from the code: `python -m tests.support.command_reference FILE`, which is `make docs`."""

import sys
from pathlib import Path

from mycli.cli.main import COMMANDS, find_command
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
(JSON lines for a stream). An error is then its field `error`, with `message`, `hint`, `exit_code` and, where its remedy
has a name, `code`, beside what was found, as where a gate fails. Away from a terminal, and where `TERM=dumb`, there is
no colour, no progress bar and no question.

Every command understands `--json`, `-q`, `-v`, `--debug`, `--offline`, `--device` and `--version`, behind its name or
before it.

The value of an option is the first of these that is given:

1. the flag: `mycli chat pico --top-p 0.9`
2. the environment: `MYCLI_CHAT_TOP_P` for one command, `MYCLI_TOP_P` for every command that has the option
3. `mycli/config.toml` in `$XDG_CONFIG_HOME` (`~/.config`): `top_p` in a table `[chat]` for one command, at the top of
   the file for every command that has the option
4. the model's `generation_config.json`
5. what `--help` shows

An option with several spellings goes by its longest one: `-t`, `--temperature` is `MYCLI_TEMPERATURE`.

Downloads live in the Hugging Face cache (`HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` are
honoured), models quantized here in `$MYCLI_HOME` (`$XDG_DATA_HOME/mycli`), history in `$XDG_STATE_HOME/mycli`.
`CUDA_VISIBLE_DEVICES` chooses among GPUs; `NO_COLOR` and `FORCE_COLOR` decide about colour, whatever the terminal says.

Completion of commands, options and names of models: `mycli --install-completion` for the shell it is called from.
"""


def page() -> str:
    """The whole of docs/commands.md."""
    parts = [_INTRODUCTION, "## Exit codes\n", "| code | meaning |\n|---:|---|"]
    parts[-1] += "".join(f"\n| {int(code)} | {meaning} |" for code, meaning in _MEANINGS.items()) + "\n"
    for name in COMMANDS:
        command = find_command(name)
        context = command.make_context(f"mycli {name}", [], resilient_parsing=True, max_content_width=100)
        context.terminal_width = 100  # the same page whatever the terminal
        parts.append(f"## mycli {name}\n\n```\n{command.get_help(context).strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
