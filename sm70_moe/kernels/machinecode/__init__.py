"""Reading machine code: what a compiled kernel contains, and what it may contain."""
