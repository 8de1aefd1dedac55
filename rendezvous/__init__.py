"""The shared truth of a cluster: a store, the records in it, and generations.

A *store* (`store.Store`) is etcd through its v2 or v3 API, or a dictionary for tests. What is kept
there is described by `keys` (where) and `records` (what). A *generation* is one fixed membership of
a job; it is defined by a *plan*, which only the elected coordinator writes, and every agent watches.
"""
