"""What kernels read: prepared weights in one rank's memory, and in files."""
