"""The HTTP application: one engine behind the protocols that clients speak."""
