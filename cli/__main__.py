"""`python -m mycli.cli`: the same as the `mycli` command."""

from mycli.cli.main import main

main()
