"""Programs that use other people's clients; they run in environments of their own, with what each client needs."""
