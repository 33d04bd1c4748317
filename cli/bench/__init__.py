"""What `mycli bench` measures beside plain speed, and how results are kept and compared."""
