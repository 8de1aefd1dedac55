"""Step times, and the batch size that follows from them.

| module | question that it answers |
|---|---|
| `step_times` | How are step times averaged? |
| `reporter` | What is measured and fitted, and what is reported to the agent? |
| `batch_size` | Which batch size is best now? |
| `training_warnings` | What is wrong with the training, and what can the user do? |
"""
