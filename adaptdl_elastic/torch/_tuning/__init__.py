"""Measure step times, and choose the batch size by them.

| module | question that it answers |
|---|---|
| `step_times` | How are step times averaged, and do they refute a prediction? |
| `step_curve` | How long would a step of another batch size take, and how certain is that? (pure) |
| `reporter` | What is measured and fitted, and what is reported to the agent? |
| `other_types` | What was measured on types of nodes that the job has left? |
| `batch_size` | Which batch size is best now? (pure) |
| `replica_speed` | How fast is each replica, compared with the others? |
| `lag` | Which replica lags? (pure) |
| `model_size` | How many bytes of gradients and of state do replicas exchange? |
| `memory_limit` | What is the largest local batch that fits into the memory of every replica? |
| `training_warnings` | What is wrong with the training, and what can the user do? |
"""
