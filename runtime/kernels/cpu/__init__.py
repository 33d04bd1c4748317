"""Native code for CPUs, compiled for the machine it runs on."""
