"""What is there: devices, the native build, backends, torch."""
