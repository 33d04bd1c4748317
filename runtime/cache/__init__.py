"""What attention remembers: keys and values of the tokens so far."""
