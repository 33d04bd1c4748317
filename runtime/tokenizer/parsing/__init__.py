"""Streaming parsers of replies: reasoning and tool calls, and the formats in which models write them."""
