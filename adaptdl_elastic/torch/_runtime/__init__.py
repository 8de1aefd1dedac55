"""One replica between two steps: where it is, and what all replicas do together.

| module | question that it answers |
|---|---|
| `position` | Where is the script? Which epochs and data loops are behind it? |
| `consensus` | How is something done on every replica at the same step? |
| `statements` | Which statement of the script is being executed? |
| `heap` | Which objects of a type are there in this process? |
"""
