"""One node: `adaptdl-run`, the elastic agent, and the replica processes that it supervises.

| question | module or package |
|---|---|
| How does the command `adaptdl-run` start, and with which exit code does it end? | `cli` |
| How is one node's part of a job run, from the command's options to an exit code? | `launch` |
| How does a node connect to the store, register, and join a job's run or begin it? | `taking_part` |
| Which options are there, and what does the user see? | `terminal` |
| What does the agent write of itself and of its job into the store? | `own_records` |
| What does the agent do about an event? (pure) | `core` |
| How is that carried out: processes, channels, the event loop? | `runtime` |
| How does the agent use the store, and start a coordinator? | `cluster` |
| What does the machine report about itself? | `machine` |
| What does the node service do? | `service` |

An option that sets a variable of the replicas' environment passes through `terminal.run_parser`,
`terminal.run_options`, `launch` and `runtime.replica_environment`. `ReplicaSettings` of
`adaptdl_elastic.protocol.environment` writes the variable here, and reads it in the replica.
"""
