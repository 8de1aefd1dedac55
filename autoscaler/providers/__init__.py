"""Providers start and stop nodes.

`base` is the interface, and `registry` finds a provider by its name, which may be of another package. `ec2`
controls auto-scaling groups, `slurm` submits jobs of one node.
"""
