"""Everything above a single run: executors, tuning, recipes, sweeps, tables and figures."""
