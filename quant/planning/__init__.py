"""What a quantization will need before it begins: work, memory and time."""
