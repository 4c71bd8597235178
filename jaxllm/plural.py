"""Counts for messages to people."""


def counted(num: int, noun: str) -> str:
    """1 replica, 2 replicas, 1,000 replicas."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"
