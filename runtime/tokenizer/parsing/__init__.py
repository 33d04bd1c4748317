"""What stands in a reply, as it streams: reasoning, calls of tools, and the data that says how a model writes them."""
