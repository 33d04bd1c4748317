"""Training the numbers of a quantized model towards the original."""
