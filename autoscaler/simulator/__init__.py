"""Replays workloads against the policy with a simulated clock."""
