"""From the outputs of a sequence to a reply: text, recorded replies, vectors of texts."""
