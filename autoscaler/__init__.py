"""The whole cluster: which job gets which nodes, and how many nodes there are.

`policy` decides (pure), `coordinator` writes the decisions into the store as plans, `scaling` decides how
many nodes to buy, `providers` start and stop nodes, `simulator` replays workloads against the same code, and
`cli` is the command `adaptdl`.
"""
