"""Results of commands as tables, cards, plots and comparisons."""
