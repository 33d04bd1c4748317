"""One model of memory: what a run takes, whether it fits, and what to change so that it does."""
