"""Running a loaded model: loading it, its fast paths, the token loop, and whole completions."""
