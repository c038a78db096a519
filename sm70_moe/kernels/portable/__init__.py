"""The contract's arithmetic in torch, on any device."""
