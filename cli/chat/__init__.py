"""The conversation of `mycli chat`, its slash commands, and reading lines from the terminal."""
