"""Between text and token ids: tokenizers, chat templates, streams, and markup of conversations."""
