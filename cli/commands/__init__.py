"""One file per command: parse, call one function, print.

A file defines a function of its own name, `(call, ...)`, decorated with `mycli.cli.command.command`, and `EXAMPLES`;
lines that start with "mycli" are run by the tests. Slow imports (torch, huggingface_hub) stand inside functions.
"""
