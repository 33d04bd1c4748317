"""What a person types and reads. Parses, calls one function of quant or runtime, prints; nothing is computed here."""
