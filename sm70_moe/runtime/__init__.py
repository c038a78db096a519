"""Running a plan: banks prepared, layers called, the service that an engine embeds."""
