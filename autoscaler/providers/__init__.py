"""Who gives nodes and takes them back.

`base` is the interface; `static` is a cluster that is what it is, `local` starts agents on this
machine, `ec2` rules auto-scaling groups, `fake` is for simulations and tests, yours included.
"""
