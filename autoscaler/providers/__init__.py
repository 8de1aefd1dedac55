"""Providers start and stop nodes.

`base` is the interface, and `registry` finds a provider by its name. `static` is a cluster of fixed nodes,
`local` starts agents on this machine, `ec2` controls auto-scaling groups, and `fake` is for simulations and
tests.
"""
