"""What a model is shown while it is quantized, and what is learned of its inputs."""
