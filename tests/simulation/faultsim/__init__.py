"""A deterministic simulator of whole clusters: the product's own agents and coordinators, and faults.

What runs for real, unchanged: the agent with all of its shell (`agent.runtime.agent.NodeAgent`, its pure
core, its watches, writer, registration, view of the store, reports, event log, and how it keeps a
coordinator), the way in which agents join a job, the coordinator with all of its shell (election, standby,
fencing, watch, decisions, rounds of the policy), plans in the store, and the thread that keeps leases alive.

What is simulated: time and threads (`kernel`, `threads`, put in place by `patching`), the store's server and
the network to it (`etcd`, `client`), processes, signals, channels and fork servers (`node`), and replicas, as
a small model of the training library's protocol (`replica`, `control`, `rescale`, `mesh`). The policy draws
allocations at random among those that are allowed.

What goes wrong (`faults`): processes, fork servers and machines die, at any moment, just before a write and
while a change is under way; replicas hang; processes and machines stop and go on; wall clocks are set;
machines are cut off from the store (`client`) and from each other (`network`); requests and answers get lost,
or come late; the store goes away, forgets its history, lets leases run out; people drain nodes and hurry
them, ask for other sizes, stop jobs and start them again, and start an agent where there is one. A third of
the faults wait for a change, and some for the end of a script. In some runs what is broken stays broken for a
while: machines, agents and replicas do not come back, and cuts last.

What must hold (`truth`, `standing`, and the history checker in tests/support): one process to a
slot, one generation at a
time, no step lost without a fault or done twice, restarts counted as promised, no job called done that is
not, no agent that goes on without its name, no job that stands still though nodes can run it, nothing logged
as an error, and after healing every job trains within a bound and comes to its end.

Not modelled: the drivers of the store (they have tests of their own, against a real etcd), torch, and what
each module says of itself. A seed repeats a run exactly: `python -m faultsim --seed 7 --runs 1 --trace`.
"""
