"""`python -m cuda_ext.distributed plan`: what the gradients of a model would cost on a cluster.

| module | contents |
|---|---|
| `command` | the command line |
| `model_shapes`, `presets` | parameters of models, from files and by name |
| `predictor` | the predictions, by `cuda_ext.distributed.bucketing` |
| `plot`, `quantities` | the plot; numbers with units |

Nothing here uses torch, unless `model_shapes.save` is given a module.
"""
