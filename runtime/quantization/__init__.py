"""Number formats: which linears are packed and how, and what the packed bits mean."""
