"""Ranks and how they meet: threads of this process (LocalGroup) or processes (ProcessRanks)."""
