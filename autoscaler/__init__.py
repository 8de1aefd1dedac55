"""The whole cluster: who gets which nodes, and how many nodes there are.

`policy` decides (pure), `coordinator` carries decisions into the store, `providers` give and take
nodes, `simulator` replays workloads against the same code, `cli` is the command `adaptdl`.
"""
