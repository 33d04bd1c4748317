"""Programs that use third-party clients; they run in separate environments with each client's packages."""
