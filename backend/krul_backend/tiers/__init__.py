"""Tiers: the memories and disks that hold encoded bytes."""
