"""A simulator that replays workloads against a policy with a simulated clock."""
