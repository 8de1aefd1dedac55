"""Keep a replica's position in the script, and act at the same step on all replicas.

| module | question that it answers |
|---|---|
| `position` | Which epochs and data loops has the script finished, and where is it in the current one? |
| `consensus` | How do all replicas act at the same step? |
| `drift` | Have the replicas stepped at the same batches, and are their parameters equal? |
| `rounds` | When does rank 0 ask all replicas to act, and at which step do they? |
| `script_names` | Which names have the script's loops assigned, and which does a new process lack? |
| `heap` | Which objects of a type exist in this process? |
| `inner_loops` | Where are the data loops that run inside another data loop? |
| `step_clock` | What is this replica doing now, and how long did each part of a step take? |
| `worker_processes` | How do workers of data loaders and pools survive a SIGTERM to all processes of a job? |
| `hang_watch` | Which replica do all others wait for without end? |
"""
