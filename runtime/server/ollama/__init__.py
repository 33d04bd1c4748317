"""The routes of Ollama's interface, on the same engine."""
