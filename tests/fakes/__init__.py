"""Servers on localhost that stand in for Google's, so that the real clients are tested without an account."""
