"""The decoder as pure functions of its inputs: no idea how, or for whom, it is run."""
