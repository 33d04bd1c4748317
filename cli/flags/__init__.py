"""Options of commands: their types, records of related options, and config.toml."""
