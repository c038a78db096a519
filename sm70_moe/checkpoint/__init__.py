"""What a folder says: declarations, headers, names, shapes, and what must be refused."""
