"""HTTP: connections, bodies, access, errors and logs, without the model."""
