"""The journal of a run: what happened, in order, so that it can be trusted, resumed and played again.

Read `event` first (chains, kinds, the protocol), then `group_commit` (many appends, one commit), `sqlite` (one machine)
or `postgres` and `leases` (many), `seal` and `verify` (was it changed?).
"""
