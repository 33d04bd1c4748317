"""From logits to a token, free or within a grammar, with log-probabilities where wanted."""
