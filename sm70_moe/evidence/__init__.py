"""Is a route right? Bounds, and trials that run a route as a black box."""
