"""The records in the store, and their keys.

| question | module |
|---|---|
| Which records are there, and which values are valid? | `records` |
| What does the autoscaler write? | `autoscaler_status` |
| What do node services and submitted jobs write? | `submissions` |
| Under which key is a record kept? | `keys` |
| What does a node hold of a job? | `held` |
| Which nodes of a job have slow links? | `node_links` |
"""
