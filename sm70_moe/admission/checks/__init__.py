"""The checks of admission: each looks at one thing and returns one finding.

Nothing here knows about flags or stops at a failure; `admission` puts findings together.
"""
