"""How many nodes there should be: what a node is worth, what can be bought, and the autoscaler's loop.

| question | module |
|---|---|
| What is observed, remembered and done? | `scaling_types` |
| How are the store and the provider observed? | `observe` |
| What is remembered of instances, pools and costs? | `observed_history` |
| Which size is a job worth? | `economics` |
| What is there, and what can be bought? | `node_market` |
| Which node is exchanged for a cheaper one? | `exchange` |
| Which nodes are bought together, and which are idle? | `idle_nodes` |
| Which pools are worth their money? (pure) | `pool_account` |
| Which settings do tags of a group change? (pure) | `live_settings`, `setting_texts` |
| Which actions follow, and which jobs have cost their limit? (pure) | `step` |
| How does the loop run? | `autoscaler_loop` |
"""
