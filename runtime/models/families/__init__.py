"""One file per `model_type` with `read(config.json) -> ModelConfig`; the file name is the registry."""
