"""One run: its config and id, its folder, training it, and the list of all runs."""
