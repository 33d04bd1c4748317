"""What makes a packed model and measures its quality, with the runtime as its instrument. Never prints."""
