"""Explain and check: why a job has what it has, whether a node is fit, what Prometheus reads.

| question | module |
|---|---|
| Is this node fit, and is the store? | `checks` |
| Why does a job have its size? | `explanation` |
| Which metrics does a coordinator serve? | `prometheus` |
"""
