"""Replays recorded sessions against the real tiers under a virtual clock, to judge eviction policies."""
