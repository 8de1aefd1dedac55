"""Train models whose parameters torch's `fully_shard` (FSDP2) divides among the replicas.

| module | question that it answers |
|---|---|
| `layout` | Which rows of a tensor does each replica hold, and which rows move in a change? (pure) |
| `fully_shard` | How is torch's private interface of FSDP2 used? (only here) |
| `links` | How do parts and their copies communicate, and what becomes of a step that loses a replica? |
| `doubt` | How is a step taken back that the others may have taken or not? |
| `reshard` | How do the rows move between replicas, and how is the model sharded again? |
| `model_state` | What does a checkpoint hold of the model, and what does a newcomer receive? |
| `noise` | How is gradient noise measured where each replica holds a part of the sums? |
| `window` | What becomes of the gradients of an accumulation window between its passes? |
"""
