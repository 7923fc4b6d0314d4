"""The foundation: problem → tile plan → backend plan, caches, oracle, registry, portable routes."""
