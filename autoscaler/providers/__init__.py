"""Providers start and stop nodes.

`base` is the interface, and `registry` finds a provider by its name. `local` starts agents on this machine,
and `ec2` controls auto-scaling groups.
"""
