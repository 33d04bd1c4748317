"""Plans a quantization before it begins: tensors, memory and time."""
