"""The command line: parses arguments, calls one function of quant or runtime, and prints the result."""
