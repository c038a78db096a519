"""The command line, one command a file; `app` puts them together."""
