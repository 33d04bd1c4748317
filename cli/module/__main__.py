"""Runs `python -m mycli`."""

# Installed as mycli/__main__.py. `mycli` has no folder in the repository: it is a namespace of cli, quant and runtime,
# and pyproject.toml maps it to this folder, which contains nothing else. A __main__.py of a namespace is found like a
# module of a package, whereas an __init__.py here would hide the parts of other distributions.
#
# The command `mycli` needs it where the folder of scripts is not on PATH: pip prints a warning then, and the usual
# answer is `python -m`.

from mycli.cli.__main__ import start_program

if __name__ == "__main__":
    start_program()
