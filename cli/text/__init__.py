"""Text in and out: prompts, numbers, JSON lines, terminal layout, progress."""
