"""Average gradients, and compute the gradient noise scale from their norms.

| module | question that it answers |
|---|---|
| `comm_hook` | How are gradients averaged, and which norms are computed meanwhile? |
| `accumulation` | What weight does a micro-batch have, and where is its gradient kept? |
| `measurement` | Which steps are measured, and when is the result read? |
| `estimator` | Which estimator follows from two norms? (formulas and sources) |
| `noise_scale` | What are the running estimates, the gain and the progress of a model? |
| `loss_reduction` | Is the loss a sum over the samples of a batch? |
| `gradient_health` | Are gradients finite? |
| `grad_scaler` | What does a GradScaler do in the middle of an accumulation window? |
| `model_state` | What does a checkpoint hold of a model? |
| `script_options` | Which options does a script set otherwise than the checkpoint, and which count? |
| `row_gradients` | How is the gradient of some samples taken from a backward pass? |
| `pace` | How often is a step measured? |
| `half_pass` | How is the variance measured by running the model again on half of a batch? |
| `chunked_forward` | How does a module run on a batch that does not fit into memory? |
| `out_of_memory` | What happens when a step does not fit into memory? |
| `memory_search` | What is the largest batch that fits into memory? |
"""
