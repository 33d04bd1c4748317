"""From config.json to a ModelConfig, without torch. A family is one file in `families`."""
