"""What the operator wants: flags, variables, layer lists, and where each value came from."""
