"""Requests of clients: their fields, formats, prompts and grammars."""
