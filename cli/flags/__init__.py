"""Options of commands: their types, records of those that go together, and where their defaults come from."""
