"""The coordinator: decides which nodes each job of a cluster has, and writes that down as plans.

`core.decide` is pure: a view of the store in, compare-and-swaps out. `process` is the edge: an election,
a watch and a loop. Between them: `job` (one job looked at by itself), `slots` (whose are they), `policy`
(the question that is put to the policy), `status` (what people are told), `types`.
"""
