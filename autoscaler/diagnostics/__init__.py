"""Explain and check: a job's size, a node's and the store's condition, metrics for Prometheus.

| question | module |
|---|---|
| Are this node and the store in order? | `checks` |
| Why does a job have its size? | `explanation` |
| What do tables, pages and metrics show of a job or a node? | `rows` |
| Which metrics does a coordinator serve? | `prometheus` |
| What does a run's event log tell about the run? | `run_report` |
| How is that report drawn as a page? | `report_page` |
"""
