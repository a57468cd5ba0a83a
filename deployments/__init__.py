"""The service on Ray Serve. Imports `scoring`, which never imports this."""

from deployments.client import AsyncScoringClient, ScoringClient

__all__ = ["AsyncScoringClient", "ScoringClient"]
