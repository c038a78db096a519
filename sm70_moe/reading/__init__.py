"""From a checkpoint's tensors to a rank's banks."""
