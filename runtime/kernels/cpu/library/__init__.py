"""The native code as a library: its instructions, its compiler, the one that a wheel carries, and its functions."""
