"""The HTTP server: one engine behind OpenAI's and Anthropic's interfaces."""
