"""What the bits of a checkpoint mean: formats, words, codes, rows."""
