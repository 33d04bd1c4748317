"""Plans a quantization before it begins: tensors, widths, memory and time."""
