"""Running the native build: launches, self-tests and the backend that uses them."""
