"""Carry out what the core decides: processes, sockets, the event loop.

| question | module |
|---|---|
| Which module executes the actions of `core.decisions`? | `agent` |
| How does the agent wait for events, posts of other threads and timers? | `event_loop` |
| How does a replica's process start? | `replica_starter`, `fork_server`, `forked_child` |
| Which environment does a replica get? | `replica_environment` |
| Are the files of the job's code still those that it trains with? | `code_version` |
| Which decisions are kept, to be replayed? | `decision_recorder` |
| What has a replica reported so far? | `replica_handle` |
| Where do the replicas of a generation meet? | `generation_store` |
| With which values is an agent started? | `agent_config` |
| Why did a replica fail, and what is the user told of it? | `failure_reports`, `failure_reporter` |
"""
