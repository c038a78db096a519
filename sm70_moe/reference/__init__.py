"""The contract's arithmetic in numpy and FP64; shares nothing with what it judges."""
