"""`python -m cuda_ext.distributed plan`: what the gradients of a model cost on a cluster, without either.

| module | contents |
|---|---|
| `command` | the command line |
| `model_shapes`, `presets` | parameters of models, from files and by name |
| `predictor` | the predictions, by `cuda_ext.distributed.bucketing` |
| `plot`, `quantities` | the plot; numbers with units |
| `layers` | not of the command: a layer whose rows are exchanged whole or in chunks (`plan_sequence_parallel`) |

Nothing here uses torch, unless `model_shapes.save` is given a module.
"""
