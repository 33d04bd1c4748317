"""From the name of a model to a folder: this machine, the Hugging Face cache, the hub. The one room with a network."""
