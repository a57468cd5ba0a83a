"""What runs inside vLLM's own processes; reached through the entry points in pyproject.toml."""
