"""Explain and check: a job's size, a node's and the store's condition, metrics for Prometheus.

| question | module |
|---|---|
| Are this node and the store in order? | `checks` |
| Why does a job have its size? | `explanation` |
| Which metrics does a coordinator serve? | `prometheus` |
"""
