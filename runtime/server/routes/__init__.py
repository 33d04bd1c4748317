"""One file for each endpoint, or for those that belong together."""
