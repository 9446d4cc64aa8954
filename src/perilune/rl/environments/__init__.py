"""Environments that ship. Each file is one: its tasks, its conversation, its judge."""
