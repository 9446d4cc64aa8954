"""Fixtures for all tests of the swarm."""

from tests.swarm.postgres import postgres_dsn

__all__ = ["postgres_dsn"]
