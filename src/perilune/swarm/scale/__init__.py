"""Agents on many machines: workers in a pool, one PostgreSQL journal, leases that move when a worker is lost."""
