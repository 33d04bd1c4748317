"""One file per `model_type`, each with `read(config.json) -> ModelConfig`; the file name is the registry."""
