"""The shared store of a cluster: drivers, keys, records, and the plug-in for plain torchrun.

A *store* (`store.base.Store`) is an etcd, reached through its v2 or v3 API, or a dictionary in memory.
`schema.keys` says where something is kept, `schema.records` what is kept there. A *generation* is one fixed
membership of a job. A *plan* defines it: only the leading coordinator writes plans, and every agent watches
them.

`local` concerns one machine: the store of a standalone job, addresses and directories. `services` is what the
commands of `adaptdl` and the node services share. `torchrun` is the plug-in.

Agents and the autoscaler also share `text`, the wording for people, `run_record`, which reads a run from its
event log, and `decision_record`, which keeps the last decisions and writes them to a file.
"""
