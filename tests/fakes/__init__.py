"""Stand-ins: servers on localhost for real clients without an account, and networks."""
