"""Generates docs/commands.md: `python -m tests.support.command_reference FILE`, part of `make docs`."""

import sys
from pathlib import Path

from mycli.cli.main import COMMANDS, find_command
from mycli.runtime.errors import ExitCode

MEANINGS = {
    ExitCode.OK: "success",
    ExitCode.BUG: "a bug in mycli",
    ExitCode.USAGE: "an invalid command line, option or prompt",
    ExitCode.MODEL: "an invalid or unsupported model or file",
    ExitCode.NOT_FOUND: "not found, gated, or the network is down",
    ExitCode.RESOURCES: "not enough memory or disk, or no such device",
    ExitCode.GATE: "the work was done, but a quality or verification gate failed",
    ExitCode.INTERRUPT: "Ctrl-C",
    ExitCode.PIPE: "the reader of the output is gone: measurements end then, files are finished first",
    ExitCode.TERMINATED: "SIGTERM or SIGHUP",
}

_INTRODUCTION = """# Commands

Reference of all commands and options, generated from the code by `make docs`.

    mycli --help

## Output

Results go to standard output, everything else to standard error. Away from a terminal, and with
`TERM=dumb`, there are no colours, progress bars and questions.

`--json` prints one JSON object with `schema_version`, or JSON lines for a stream. Errors are its
field `error`:

| field | content |
|---|---|
| `message` | the cause |
| `hint` | what to do |
| `exit_code` | see below |
| `code` | the name of the remedy, if it has one |

If a gate fails, the object contains the results in addition to `error`.

## Options and settings

Every command accepts `--json`, `-q`, `-v`, `--debug`, `--offline`, `--device` and `--version`,
before or after its name. The value of an option is the first of these that is set:

1. the option: `mycli chat pico --top-p 0.9`
2. the environment: `MYCLI_CHAT_TOP_P` for one command, `MYCLI_TOP_P` for all commands with the
   option
3. `mycli/config.toml` in `$XDG_CONFIG_HOME` (`~/.config`): `top_p` in a table `[chat]` for one
   command, at the top of the file for all commands with the option
4. the model's `generation_config.json`
5. the default that `--help` shows

The longest spelling of an option names its variable: `-t`, `--temperature` is `MYCLI_TEMPERATURE`.

Common names of the same option in llama.cpp, mlx-lm and vLLM are accepted too: `--temp`,
`--ctx-size`, `--n-predict`, `--max-model-len`. For other options of these programs, the error
message names the option here. `-t` is the temperature; the number of threads is `--threads`.

## Environment

| variable | effect |
|---|---|
| `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` | the Hugging Face cache and Hub |
| `MYCLI_HOME` | models quantized here (default: `$XDG_DATA_HOME/mycli`) |
| `XDG_STATE_HOME` | history in `mycli/` |
| `CUDA_VISIBLE_DEVICES` | selects GPUs |
| `NO_COLOR`, `FORCE_COLOR` | switch colours off or on |

`mycli --install-completion` installs completion of commands, options and model names for the
current shell.
"""


def page() -> str:
    parts = [_INTRODUCTION, "## Exit codes\n", "| code | meaning |\n|---:|---|"]
    parts[-1] += "".join(f"\n| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()) + "\n"
    for name in COMMANDS:
        command = find_command(name)
        context = command.make_context(f"mycli {name}", [], resilient_parsing=True, max_content_width=100)
        context.terminal_width = 100  # independent of the terminal
        parts.append(f"## mycli {name}\n\n```\n{command.get_help(context).strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
