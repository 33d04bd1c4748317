"""Parts of `serve` besides its command: several models, other engines, requests to a local server."""
