"""This machine: where a model can run, in which precision, how much memory there is and how fast it is."""
