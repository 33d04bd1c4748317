"""`mycli chat`: the conversation, what is typed after a slash, and the terminal."""
