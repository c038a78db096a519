"""What was decided, frozen: routes by tokens, memory, agreement of ranks, drift."""
