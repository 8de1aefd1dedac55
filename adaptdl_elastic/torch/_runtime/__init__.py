"""Keep a replica's position in the script, and act at the same step on all replicas.

| module | question that it answers |
|---|---|
| `position` | Which epochs and data loops has the script finished, and where is it in the current one? |
| `consensus` | How do all replicas act at the same step? |
| `statements` | Which statement of the script is being executed? |
| `heap` | Which objects of a type exist in this process? |
"""
