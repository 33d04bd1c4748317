"""HTTP endpoints: one file for each, or for those that belong together."""
