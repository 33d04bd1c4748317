"""Small things without a better room: a folder that appears whole, a bounded child process, checked JSON."""
