"""Engines: what runs a network, on which device."""
