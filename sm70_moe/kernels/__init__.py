"""What runs layers: the backends' protocol and registry, portable and native backends, machine code."""
