"""One file per command: parse, call one function, print.

A file defines `command(call, ...)`, decorated with `mycli.cli.command.command`, and lists `EXAMPLES` for its help page;
lines that start with "mycli" are run by the tests. Slow imports (torch, huggingface_hub) stand inside functions.
"""
