"""How long a layer takes on this machine: arms timed side by side in one run, checked, written down."""
