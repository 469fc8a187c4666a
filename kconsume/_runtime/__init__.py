"""One running consumer: what it polls, runs, commits and reports."""
