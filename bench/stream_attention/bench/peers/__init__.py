"""Peers: other ways to compute the same thing. Each module registers its own when imported."""
