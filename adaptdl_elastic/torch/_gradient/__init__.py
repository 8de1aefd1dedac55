"""From gradients to the gradient noise scale, and what a step does to them.

| module | question that it answers |
|---|---|
| `comm_hook` | How are gradients averaged, and which norms are computed meanwhile? |
| `accumulation` | What weight does a micro-batch have, and where is its gradient kept? |
| `measurement` | Which steps are measured, and when is the result read? |
| `estimator` | Which estimator follows from two norms? (formulas and sources) |
| `noise_scale` | What are the running estimates, the gain and the progress of a model? |
| `gradient_health` | Are gradients finite? |
| `grad_scaler` | What does a GradScaler do in the middle of an accumulation window? |
| `model_state` | What does a checkpoint hold of a model? |
| `model_snapshot` | What does a step change of a model besides its parameters? |
"""
