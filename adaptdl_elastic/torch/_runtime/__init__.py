"""Keep a replica's position in the script, and act at the same step on all replicas.

| module | question that it answers |
|---|---|
| `position` | Which epochs and data loops has the script finished, and where is it in the current one? |
| `consensus` | How do all replicas act at the same step? |
| `rounds` | When does rank 0 ask all replicas to act, and at which step do they? |
| `statements` | Which statement of the script is being executed? |
| `loop_names` | Which names does the script expect a loop to have assigned? |
| `heap` | Which objects of a type exist in this process? |
| `inner_loops` | Where are the data loops that run inside another data loop? |
| `step_clock` | What is this replica doing now, and how long did each part of a step take? |
| `hang_watch` | Which replica do all others wait for without end? |
"""
