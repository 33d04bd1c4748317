"""Text on its way in and out: prompts, columns of a terminal, numbers, lines of JSON, what moves."""
