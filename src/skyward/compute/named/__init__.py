"""Calls by name on a pool that stays: they go on without their client, and keep their results."""
